package e2b

import (
	"testing"

	"berth/internal/computer"
	"berth/internal/providers"
)

// BenchmarkRoundTrips: what a batch, a picture and a create cost beside the
// network, on the stand-in. The floor is a program that does nothing.
func BenchmarkRoundTrips(b *testing.B) {
	p := connect(b, startStandin(b))
	if _, err := p.Create(b.Context(), providers.Spec{VM: "vm", Fence: 1}); err != nil {
		b.Fatal(err)
	}
	box := must(p.box(b.Context(), "vm"))
	batch := func(actions ...computer.Action) func() error {
		return func() error {
			_, err := p.Execute(b.Context(), providers.Batch{VM: "vm", Actions: actions})
			return err
		}
	}
	ten := make([]computer.Action, 10)
	for i := range ten {
		ten[i] = at(computer.Click, 100+i, 100)
	}
	for _, c := range []struct {
		name string
		f    func() error
	}{
		{"nothing", func() error {
			_, err := p.talk(b.Context(), box, process{args: []string{"-c", ":"}}, func([]byte) error { return nil })
			return err
		}},
		{"click", batch(at(computer.Click, 100, 100))},
		{"ten clicks", batch(ten...)},
		{"run", batch(computer.Action{Type: computer.Run, Argv: []string{"true"}})},
		{"observe", func() error { _, err := p.Observe(b.Context(), "vm"); return err }},
	} {
		b.Run(c.name, func(b *testing.B) {
			for b.Loop() {
				if err := c.f(); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
