package main

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

// rpcError is an error of the Connect protocol.
type rpcError struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

func (e *rpcError) Error() string { return e.Message }

// statuses of the codes in use (Connect protocol, "Error codes").
var statuses = map[string]int{
	"invalid_argument": 400, "deadline_exceeded": 504, "not_found": 404, "already_exists": 409, "permission_denied": 403,
	"resource_exhausted": 429, "failed_precondition": 400, "unimplemented": 501, "internal": 500, "unavailable": 503, "unauthenticated": 401,
}

func asRPC(err error) *rpcError {
	var e *rpcError
	switch {
	case errors.As(err, &e):
		return e
	case errors.Is(err, context.DeadlineExceeded):
		return &rpcError{"deadline_exceeded", err.Error()}
	}
	return &rpcError{"internal", err.Error()}
}

const maxMessage = 4 << 20

// decodeStrict reads a message; an unknown field is refused.
func decodeStrict(raw []byte, into any) error {
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	if err := dec.Decode(into); err != nil {
		return &rpcError{"invalid_argument", "bad message: " + err.Error()}
	}
	return nil
}

// deadline reads Connect-Timeout-Ms.
func deadline(r *http.Request) (time.Duration, error) {
	text := r.Header.Get("Connect-Timeout-Ms")
	if text == "" {
		return 0, nil
	}
	n, err := strconv.ParseInt(text, 10, 64)
	if err != nil || n < 0 || len(text) > 10 {
		return 0, &rpcError{"invalid_argument", "bad Connect-Timeout-Ms"}
	}
	return time.Duration(n) * time.Millisecond, nil
}

// unary serves a call with one message each way, in JSON.
func unary[In any](h func(r *http.Request, in In) (any, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if t := r.Header.Get("Content-Type"); !strings.HasPrefix(t, "application/json") {
			w.Header().Set("Accept-Post", "application/json")
			w.WriteHeader(http.StatusUnsupportedMediaType)
			return
		}
		var in In
		raw, err := io.ReadAll(io.LimitReader(r.Body, maxMessage+1))
		if err == nil && len(raw) > maxMessage {
			err = &rpcError{"resource_exhausted", "message too large"}
		}
		if err == nil {
			err = decodeStrict(raw, &in)
		}
		var out any
		if err == nil {
			out, err = h(r, in)
		}
		if err != nil {
			e := asRPC(err)
			answer(w, statuses[e.Code], e)
			return
		}
		answer(w, http.StatusOK, out)
	}
}

// stream sends the messages of a server stream.
type stream struct {
	w http.ResponseWriter
}

func (s *stream) send(flags byte, message any) error {
	raw, err := json.Marshal(message)
	if err != nil {
		return fmt.Errorf("encode a message: %w", err)
	}
	head := binary.BigEndian.AppendUint32([]byte{flags}, uint32(len(raw)))
	if _, err := s.w.Write(append(head, raw...)); err != nil {
		return err
	}
	return http.NewResponseController(s.w).Flush()
}

// endStream marks the last envelope.
const endStream = 0x02

// streaming serves a call with one message in and many out, in JSON.
func streaming[In any](h func(r *http.Request, in In, s *stream) error) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if t := r.Header.Get("Content-Type"); t != "application/connect+json" {
			w.Header().Set("Accept-Post", "application/connect+json")
			w.WriteHeader(http.StatusUnsupportedMediaType)
			return
		}
		w.Header().Set("Content-Type", "application/connect+json")
		s := &stream{w}
		in, err := envelope[In](r.Body)
		if err == nil {
			err = h(r, in, s)
		}
		end := map[string]any{}
		if err != nil {
			end["error"] = asRPC(err)
		}
		if s.send(endStream, end) != nil {
			return // the client went away
		}
	}
}

// envelope reads the one message of a request.
func envelope[In any](body io.Reader) (in In, err error) {
	head := make([]byte, 5)
	if _, err := io.ReadFull(body, head); err != nil {
		return in, &rpcError{"invalid_argument", "no envelope"}
	}
	n := binary.BigEndian.Uint32(head[1:])
	if head[0] != 0 || n > maxMessage {
		return in, &rpcError{"invalid_argument", "an envelope that is compressed or too large"}
	}
	raw := make([]byte, n)
	if _, err := io.ReadFull(body, raw); err != nil {
		return in, &rpcError{"invalid_argument", "half a message"}
	}
	if n, err := io.Copy(io.Discard, io.LimitReader(body, 1)); n > 0 || err != nil { // to its end, or the connection could not be used again
		return in, &rpcError{"invalid_argument", "more than one message"}
	}
	return in, decodeStrict(raw, &in)
}
