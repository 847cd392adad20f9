package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// Messages of filesystem.Filesystem, in the JSON form of protobuf.

type entryInfo struct {
	Name          string `json:"name"`
	Type          string `json:"type"`
	Path          string `json:"path"`
	Size          string `json:"size"` // a 64-bit number is a string
	Mode          uint32 `json:"mode"`
	Permissions   string `json:"permissions"`
	Owner         string `json:"owner"`
	Group         string `json:"group"`
	ModifiedTime  string `json:"modifiedTime"`
	SymlinkTarget string `json:"symlinkTarget,omitempty"`
}

type pathRequest struct {
	Path string `json:"path"`
}

type moveRequest struct {
	Source      string `json:"source"`
	Destination string `json:"destination"`
}

type listDirRequest struct {
	Path  string `json:"path"`
	Depth int    `json:"depth"`
}

type entryMessage struct {
	Entry entryInfo `json:"entry"`
}

func entryOf(path string) (entryInfo, error) {
	info, err := os.Lstat(path)
	if err != nil {
		return entryInfo{}, notThere(err, path)
	}
	e := entryInfo{
		Name: info.Name(), Path: path, Size: strconv.FormatInt(info.Size(), 10), Mode: uint32(info.Mode().Perm()), Permissions: info.Mode().String(),
		Owner: "user", Group: "user", ModifiedTime: info.ModTime().UTC().Format(time.RFC3339Nano), Type: "FILE_TYPE_FILE",
	}
	switch {
	case info.IsDir():
		e.Type = "FILE_TYPE_DIRECTORY"
	case info.Mode()&fs.ModeSymlink != 0:
		e.Type = "FILE_TYPE_SYMLINK"
		if e.SymlinkTarget, err = os.Readlink(path); err != nil {
			return e, notThere(err, path)
		}
	}
	return e, nil
}

func notThere(err error, path string) error {
	if errors.Is(err, fs.ErrNotExist) {
		return &rpcError{"not_found", fmt.Sprintf("path not found: %s", path)}
	}
	return &rpcError{"internal", err.Error()}
}

func (e *envd) stat(r *http.Request, in pathRequest) (any, error) {
	p, err := who(r)
	if err != nil {
		return nil, err
	}
	entry, err := entryOf(p.path(in.Path))
	return entryMessage{entry}, err
}

func (e *envd) makeDir(r *http.Request, in pathRequest) (any, error) {
	p, err := who(r)
	if err != nil {
		return nil, err
	}
	path := p.path(in.Path)
	if _, err := os.Stat(path); err == nil {
		return nil, &rpcError{"already_exists", "directory already exists: " + path}
	}
	if err := makeAll(path, p); err != nil {
		return nil, err
	}
	entry, err := entryOf(path)
	return entryMessage{entry}, err
}

// makeAll makes a directory and what is missing above it, for p.
func makeAll(path string, p person) error {
	if info, err := os.Stat(path); err == nil {
		if !info.IsDir() {
			return &rpcError{"invalid_argument", "not a directory: " + path}
		}
		return nil
	}
	if err := makeAll(filepath.Dir(path), p); err != nil {
		return err
	}
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return &rpcError{"internal", err.Error()}
	}
	return os.Chown(path, p.uid, p.uid)
}

func (e *envd) move(r *http.Request, in moveRequest) (any, error) {
	p, err := who(r)
	if err != nil {
		return nil, err
	}
	from, to := p.path(in.Source), p.path(in.Destination)
	if err := makeAll(filepath.Dir(to), p); err != nil {
		return nil, err
	}
	if err := os.Rename(from, to); err != nil {
		return nil, notThere(err, from)
	}
	entry, err := entryOf(to)
	return entryMessage{entry}, err
}

func (e *envd) listDir(r *http.Request, in listDirRequest) (any, error) {
	p, err := who(r)
	if err != nil {
		return nil, err
	}
	root := p.path(in.Path)
	if info, err := os.Stat(root); err != nil {
		return nil, notThere(err, root)
	} else if !info.IsDir() {
		return nil, &rpcError{"invalid_argument", "path is not a directory: " + root}
	}
	depth := max(in.Depth, 1)
	out := struct {
		Entries []entryInfo `json:"entries"`
	}{[]entryInfo{}}
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if path == root {
			return nil
		}
		entry, err := entryOf(path)
		if err != nil {
			return err
		}
		out.Entries = append(out.Entries, entry)
		rel := strings.TrimPrefix(path, root)
		if d.IsDir() && strings.Count(rel, "/") >= depth {
			return fs.SkipDir
		}
		return nil
	})
	return out, err
}

func (e *envd) remove(r *http.Request, in pathRequest) (any, error) {
	p, err := who(r)
	if err != nil {
		return nil, err
	}
	if err := os.RemoveAll(p.path(in.Path)); err != nil {
		return nil, &rpcError{"internal", err.Error()}
	}
	return struct{}{}, nil
}

// fileUser is the user of /files: a parameter, or the default.
func fileUser(w http.ResponseWriter, r *http.Request) (person, bool) {
	name := r.URL.Query().Get("username")
	if name == "" {
		name = "user"
	}
	p, ok := people[name]
	if !ok {
		fileProblem(w, http.StatusUnauthorized, fmt.Sprintf("invalid username: %q", name))
	}
	return p, ok
}

func fileProblem(w http.ResponseWriter, status int, message string) {
	answer(w, status, map[string]any{"code": status, "message": message})
}

func (e *envd) download(w http.ResponseWriter, r *http.Request) {
	p, ok := fileUser(w, r)
	if !ok {
		return
	}
	path := p.path(r.URL.Query().Get("path"))
	info, err := os.Stat(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		fileProblem(w, http.StatusNotFound, fmt.Sprintf("path '%s' does not exist", path))
		return
	case err != nil:
		fileProblem(w, http.StatusInternalServerError, err.Error())
		return
	case info.IsDir():
		fileProblem(w, http.StatusBadRequest, fmt.Sprintf("path '%s' is a directory", path))
		return
	}
	w.Header().Set("Content-Type", "application/octet-stream")
	http.ServeFile(w, r, path)
}

// upload takes a form with files, or one file as the body.
func (e *envd) upload(w http.ResponseWriter, r *http.Request) {
	p, ok := fileUser(w, r)
	if !ok {
		return
	}
	path := r.URL.Query().Get("path")
	var written []map[string]string
	save := func(path string, from io.Reader) bool {
		if err := saveFile(p, p.path(path), from); err != nil {
			fileProblem(w, http.StatusInternalServerError, err.Error())
			return false
		}
		written = append(written, map[string]string{"name": filepath.Base(path), "path": p.path(path), "type": "file"})
		return true
	}
	if r.Header.Get("Content-Type") == "application/octet-stream" {
		if path == "" {
			fileProblem(w, http.StatusBadRequest, "path is required")
			return
		}
		if !save(path, r.Body) {
			return
		}
		answer(w, http.StatusOK, written)
		return
	}
	form, err := r.MultipartReader()
	if err != nil {
		fileProblem(w, http.StatusBadRequest, err.Error())
		return
	}
	for {
		part, err := form.NextPart()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			fileProblem(w, http.StatusBadRequest, err.Error())
			return
		}
		if part.FormName() != "file" {
			continue
		}
		to := path
		if to == "" {
			to = rawName(part.Header.Get("Content-Disposition"), part.FileName())
		}
		if !save(to, part) {
			return
		}
	}
	answer(w, http.StatusOK, written)
}

// rawName is a part's file name with its directories, which mime/multipart
// takes off.
func rawName(disposition, base string) string {
	_, rest, ok := strings.Cut(disposition, `filename="`)
	if name, _, closed := strings.Cut(rest, `"`); ok && closed {
		return name
	}
	return base
}

func saveFile(p person, path string, from io.Reader) error {
	if err := makeAll(filepath.Dir(path), p); err != nil {
		return err
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	_, err = io.Copy(f, from)
	return errors.Join(err, f.Chown(p.uid, p.uid), f.Close())
}
