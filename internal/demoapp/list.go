package demoapp

import "fmt"

// The list has listTotal items, handed out listBatch at a time; the page
// fetches the next batch when it is scrolled to its end.
const (
	listTotal  = 60
	listBatch  = 20
	listWanted = 60
)

// Item is a row of the list.
type Item struct {
	Number int    `json:"number"`
	Goods  string `json:"goods"`
	Port   string `json:"port"`
	Kilos  int    `json:"kilos"`
}

var (
	goods = []string{"Oranges", "Sea salt", "Cork", "Ceramic tiles", "Olive oil", "Tinned sardines", "Linen", "Green tea", "Cedar planks", "Brass fittings", "Wool", "Paper rolls", "Cocoa"}
	ports = []string{"Lisbon", "Bergen", "Gdańsk", "Trieste", "Porto", "Malmö", "Split", "Cádiz", "Piraeus"}
)

func item(n int) Item {
	return Item{Number: n, Goods: goods[(n*5)%len(goods)], Port: ports[(n*4)%len(ports)], Kilos: 80 + (n*37)%290}
}

// ListState records how far the list was loaded and what was selected by a
// double click; Selected is the last one, 0 before any.
type ListState struct {
	Loaded   int `json:"loaded"`
	Count    int `json:"count"` // selections
	Selected int `json:"selected"`
}

// load hands out the batch that follows item number after.
func (l *ListState) load(after int) ([]Item, error) {
	if after < 0 || after > listTotal {
		return nil, fmt.Errorf("query %q: 0 to %d", "after", listTotal)
	}
	last := min(after+listBatch, listTotal)
	items := make([]Item, 0, listBatch)
	for n := after + 1; n <= last; n++ {
		items = append(items, item(n))
	}
	if after <= l.Loaded { // a gap is not a list that was scrolled through
		l.Loaded = max(l.Loaded, last)
	}
	return items, nil
}

// choose refuses an item that was never loaded: nobody can have seen it.
func (l *ListState) choose(n int) error {
	if n < 1 || n > listTotal {
		return fmt.Errorf("field %q: 1 to %d", "item", listTotal)
	}
	if n > l.Loaded {
		return fmt.Errorf("field %q: %d is not loaded yet, only %d are", "item", n, l.Loaded)
	}
	l.Count++
	l.Selected = n
	return nil
}

func (l *ListState) judge() Part {
	switch {
	case l.Selected == listWanted:
		return Part{OK, fmt.Sprintf("list: selected item %d ok", l.Selected), fmt.Sprintf("Crate %d is selected.", l.Selected)}
	case l.Selected != 0:
		return Part{Wrong, fmt.Sprintf("list: selected item %d wrong", l.Selected), fmt.Sprintf("Crate %d is selected; crate %d was asked for.", l.Selected, listWanted)}
	case l.Loaded > listBatch:
		return Part{Begun, fmt.Sprintf("list: %d of %d loaded", l.Loaded, listTotal), "Nothing is selected yet."}
	default:
		return Part{None, "list: nothing yet", "Nothing is selected yet."}
	}
}
