// Package thinkers says which models this build has: what a loop-runner can
// let think, by the name that a loop.start request gives.
package thinkers

import (
	"slices"

	"berth/internal/looprunner"
	"berth/internal/looprunner/script"
)

// All returns the models by name. The map is the caller's.
func All() map[string]looprunner.ModelFactory {
	return map[string]looprunner.ModelFactory{script.Name: script.New}
}

// Names lists the models in alphabetical order.
func Names() []string {
	names := make([]string, 0, 1)
	for name := range All() {
		names = append(names, name)
	}
	slices.Sort(names)
	return names
}
