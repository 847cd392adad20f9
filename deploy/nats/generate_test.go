package main

import "testing"

func TestGeneratedFilesAreUpToDate(t *testing.T) {
	stale, err := generate("../..", true)
	if err != nil {
		t.Fatal(err)
	}
	if len(stale) > 0 {
		t.Fatalf("not up to date: %v; run `make generate`", stale)
	}
}
