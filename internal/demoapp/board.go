package demoapp

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Card is a card of the board. Goal is the column where the page wants it.
type Card struct {
	ID    int    `json:"id"`
	Text  string `json:"text"`
	Crew  string `json:"crew"`
	Start string `json:"start"`
	Goal  string `json:"goal"`
}

var columns = []string{"todo", "doing", "done"}

var cards = []Card{
	{11, "Paint the hull", "Deck", "todo", "todo"},
	{12, "Fix the lock gate", "Engine", "todo", "doing"},
	{13, "Count the ropes", "Deck", "todo", "todo"},
	{14, "Load the mail", "Cargo", "doing", "doing"},
	{15, "Ship the charts", "Bridge", "doing", "done"},
	{16, "Light the lamp", "Bridge", "done", "done"},
}

// Move is a card that was dragged to a place in a column; Index counts from
// the top, without the card itself.
type Move struct {
	Card  int       `json:"card"`
	To    string    `json:"to"`
	Index int       `json:"index"`
	At    time.Time `json:"at"`
}

// BoardState holds the columns, top card first, and the latest moves.
type BoardState struct {
	Columns map[string][]int `json:"columns"`
	Count   int              `json:"count"` // moves ever made
	Moves   []Move           `json:"moves"` // at most the latest maxMoves
}

func newBoard() BoardState {
	b := BoardState{Columns: map[string][]int{"todo": {}, "doing": {}, "done": {}}, Moves: []Move{}}
	for _, c := range cards {
		b.Columns[c.Start] = append(b.Columns[c.Start], c.ID)
	}
	return b
}

func (b *BoardState) move(m Move) error {
	if !slices.ContainsFunc(cards, func(c Card) bool { return c.ID == m.Card }) {
		return fmt.Errorf("field %q: no card %d", "card", m.Card)
	}
	if !slices.Contains(columns, m.To) {
		return fmt.Errorf("field %q: unknown column; known are %s", "to", strings.Join(columns, ", "))
	}
	others := slices.DeleteFunc(slices.Clone(b.Columns[m.To]), func(id int) bool { return id == m.Card })
	if m.Index < 0 || m.Index > len(others) {
		return fmt.Errorf("field %q: 0 to %d", "index", len(others))
	}
	for name, ids := range b.Columns {
		b.Columns[name] = slices.DeleteFunc(ids, func(id int) bool { return id == m.Card })
	}
	b.Columns[m.To] = slices.Insert(others, m.Index, m.Card)
	b.Count++
	b.Moves = append(b.Moves, m)
	if extra := len(b.Moves) - maxMoves; extra > 0 {
		b.Moves = slices.Delete(b.Moves, 0, extra)
	}
	return nil
}

// judge is wrong while a card lies in a column that is neither where it
// started nor where it is wanted. The order inside a column is free.
func (b *BoardState) judge() Part {
	at := map[int]string{}
	title := "board:"
	for _, name := range columns {
		ids := make([]string, len(b.Columns[name]))
		for i, id := range b.Columns[name] {
			at[id] = name
			ids[i] = strconv.Itoa(id)
		}
		title += " " + name + "=" + strings.Join(ids, ",")
	}
	var stray []string
	open := 0
	for _, c := range cards {
		switch at[c.ID] {
		case c.Goal:
		case c.Start:
			open++
		default:
			stray = append(stray, strconv.Itoa(c.ID))
		}
	}
	switch {
	case len(stray) > 0:
		return Part{Wrong, title + " wrong", "Not where it was asked to be: card " + strings.Join(stray, ", ") + "."}
	case open == 0:
		return Part{OK, title + " ok", "Every card is where it was asked to be."}
	case b.Count > 0:
		return Part{Begun, title, fmt.Sprintf("%d still to move.", open)}
	default:
		return Part{None, title, "No card was moved yet."}
	}
}

func (b *BoardState) clone() BoardState {
	out := BoardState{Columns: maps.Clone(b.Columns), Count: b.Count, Moves: slices.Clone(b.Moves)}
	for k, v := range out.Columns {
		out.Columns[k] = slices.Clone(v)
	}
	return out
}
