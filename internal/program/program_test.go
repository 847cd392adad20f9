package program

import (
	"errors"
	"reflect"
	"regexp"
	"strings"
	"testing"
)

// The usage names every variable that the config reads.
func TestUsageIsComplete(t *testing.T) {
	var walk func(reflect.Type)
	walk = func(typ reflect.Type) {
		for f := range typ.Fields() {
			if name, _, _ := strings.Cut(f.Tag.Get("env"), ","); name != "" && !strings.Contains(EnvironmentHelp, name) {
				t.Errorf("-h does not mention %s", name)
			}
			if f.Type.Kind() == reflect.Struct {
				walk(f.Type)
			}
		}
	}
	walk(reflect.TypeFor[Config]())
}

func TestParseNamesTheVariable(t *testing.T) {
	t.Setenv("NATS_WAIT", "perhaps")
	var cfg struct {
		Config
		Key string `env:"X_KEY_FILE,file"`
	}
	t.Setenv("X_KEY_FILE", "/nowhere/key")
	faults := Parse(&cfg)
	got := errors.Join(faults...)
	if len(faults) != 2 || !strings.Contains(got.Error(), "NATS_WAIT: not a boolean") || !strings.Contains(got.Error(), `X_KEY_FILE: cannot read the file "/nowhere/key": no such file`) {
		t.Errorf("faults: %v", got)
	}
}

func TestUniqueName(t *testing.T) {
	a, b := UniqueName(), UniqueName()
	if a == b || !regexp.MustCompile(`^[A-Za-z0-9_-]+-[0-9]+-[A-Za-z0-9]+$`).MatchString(a) {
		t.Errorf("%q %q", a, b)
	}
}
