package events

import (
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Validate fills the defaults of a create request and returns a *DataError
// that names the first fault.
func (c *SandboxCreate) Validate() error {
	if c.VMID != "" {
		if err := CheckID("vmId", c.VMID); err != nil {
			return BadInput("%v", err)
		}
	}
	if c.Role == "" {
		c.Role = DefaultRole
	}
	if err := CheckID("role", c.Role); err != nil {
		return BadInput("%v", err)
	}
	if c.Display != nil {
		if err := c.Display.Validate(); err != nil {
			return BadInput("%v", err)
		}
	}
	for _, f := range []struct {
		name     string
		v        **float64
		def, max time.Duration
	}{
		{"ttlSeconds", &c.TTLSeconds, DefaultTTL, MaxTTL},
		{"queueTimeoutSeconds", &c.QueueTimeoutSeconds, DefaultQueueTimeout, 24 * time.Hour},
		{"idleTimeoutSeconds", &c.IdleTimeoutSeconds, 0, MaxTTL},
	} {
		if err := checkSeconds(f.name, f.v, f.def, f.max); err != nil {
			return err
		}
	}
	for _, s := range []struct{ name, v string }{{"owner", c.Owner}, {"session", c.Session}, {"template", c.Template}} {
		if len(s.v) > 256 || strings.ContainsFunc(s.v, func(r rune) bool { return r < 0x20 }) {
			return BadInput("%s: at most 256 bytes without control characters", s.name)
		}
	}
	switch c.IdlePolicy {
	case "", IdleKill:
	case IdlePause:
		if c.IdleTimeoutSeconds == nil {
			return BadInput("idlePolicy: %q goes with idleTimeoutSeconds", c.IdlePolicy)
		}
		if !slices.Contains(c.Requires, capabilityPause) {
			c.Requires = append(slices.Clone(c.Requires), capabilityPause)
		}
	default:
		return BadInput("idlePolicy: %q; want %q or %q", c.IdlePolicy, IdleKill, IdlePause)
	}
	if len(c.Requires) > 32 {
		return BadInput("requires: at most 32 capabilities")
	}
	for _, r := range c.Requires {
		if err := CheckID("requires", r); err != nil {
			return BadInput("%v", err)
		}
	}
	if err := c.checkConditions(); err != nil {
		return err
	}
	size := 0
	for _, m := range []map[string]string{c.Env, c.Metadata} {
		for k, v := range m {
			if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
				return BadInput("env and metadata: names are not empty and have no '=' or NUL")
			}
			size += len(k) + len(v)
		}
	}
	if size > MaxEnvAndMetadata {
		return &DataError{CodeTooLarge, fmt.Sprintf("env and metadata are %d bytes together, at most %d", size, MaxEnvAndMetadata)}
	}
	return nil
}

// capabilityPause is what a server declares whose sandboxes can be paused.
const capabilityPause = "pause"

func (c *SandboxCreate) checkConditions() error {
	if len(c.Constraints) > 32 || len(c.Affinities) > 32 {
		return BadInput("at most 32 constraints and 32 affinities")
	}
	for i, k := range c.Constraints {
		if err := k.check(fmt.Sprintf("constraints[%d]", i)); err != nil {
			return err
		}
	}
	for i, a := range c.Affinities {
		if err := a.check(fmt.Sprintf("affinities[%d]", i)); err != nil {
			return err
		}
		if a.Weight < -100 || a.Weight > 100 {
			return BadInput("affinities[%d].weight: -100 to 100", i)
		}
	}
	return nil
}

func (k Constraint) check(where string) error {
	if k.Attribute == "" || len(k.Attribute) > 64 {
		return BadInput("%s.attribute: 1 to 64 characters", where)
	}
	n := len(k.Value)
	switch k.Operator {
	case "=", "!=":
		if n != 1 {
			return BadInput("%s: operator %q takes one value", where, k.Operator)
		}
	case "<", ">":
		if n != 1 {
			return BadInput("%s: operator %q takes one number", where, k.Operator)
		}
		if _, err := strconv.ParseFloat(k.Value[0], 64); err != nil {
			return BadInput("%s: operator %q takes a number, not %q", where, k.Operator, clip(k.Value[0]))
		}
	case "in", "notin":
		if n == 0 || n > 64 {
			return BadInput("%s: operator %q takes 1 to 64 values", where, k.Operator)
		}
	case "exists":
		if n != 0 {
			return BadInput("%s: operator exists takes no value", where)
		}
	default:
		return BadInput("%s: unknown operator %q; known are = != in notin > < exists", where, clip(k.Operator))
	}
	return nil
}

func checkSeconds(name string, v **float64, def, max time.Duration) error {
	if *v == nil {
		if def > 0 {
			d := def.Seconds()
			*v = &d
		}
		return nil
	}
	s := **v
	if math.IsNaN(s) || s <= 0 || s > max.Seconds() {
		return BadInput("%s: %v is not in 0 (exclusive) to %v seconds", name, s, max.Seconds())
	}
	return nil
}

// Seconds converts a JSON number of seconds.
func Seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
