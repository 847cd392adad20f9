package main

import (
	"os"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"berth/internal/program/programtest"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"loop-runner": func() { os.Exit(run()) }})
}

func TestScripts(t *testing.T) { programtest.Run(t, "testdata") }
