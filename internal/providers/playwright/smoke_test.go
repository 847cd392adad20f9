package playwright

import (
	"log/slog"
	"os"
	"testing"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
)

func TestSmoke(t *testing.T) {
	log := slog.New(slog.NewTextHandler(os.Stderr, nil))
	t0 := time.Now()
	p, err := New(t.Context(), Options{ServerID: "playwright-01", StateDir: t.TempDir(), Logger: log})
	if err != nil {
		t.Fatal(err)
	}
	t.Log("new", time.Since(t0))
	t0 = time.Now()
	s, err := p.Create(t.Context(), providers.Spec{VM: "a", Fence: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Log("create cold", time.Since(t0), s)
	do := func(as ...computer.Action) []providers.Result {
		t.Helper()
		t0 := time.Now()
		rs, err := p.Execute(t.Context(), providers.Batch{VM: "a", Fence: 1, Actions: as})
		t.Log(as[0].Type, time.Since(t0))
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range rs {
			if r.Error != nil {
				t.Error(r.Error)
			}
		}
		return rs
	}
	html := `data:text/html,<title>hi</title><body style="background:linear-gradient(red,blue)"><textarea id=a autofocus rows=5 cols=80></textarea><script>document.onclick=()=>document.title='clicked'</script>`
	do(computer.Action{Type: computer.Open, Target: html})
	x, y := 100, 40
	c := computer.Action{Type: computer.Click, X: &x, Y: &y}
	do(c)
	do(c)
	txt := "Héllo wörld 美 🎉\nAbC\td"
	do(computer.Action{Type: computer.TypeText, Text: &txt})
	txt = "abcdefghijklmnopqrstuvwxy"
	do(computer.Action{Type: computer.TypeText, Text: &txt})
	for range 3 {
		t0 = time.Now()
		v, err := p.Observe(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		t.Logf("observe %s %d bytes %+v", time.Since(t0), len(v.PNG), v.Observation)
		os.WriteFile("/tmp/pw/shot.png", v.PNG, 0o644)
	}
	do(computer.Action{Type: computer.Key, Keys: []string{"Control", "a"}}, computer.Action{Type: computer.Key, Keys: []string{"Control", "c"}}, computer.Action{Type: computer.Key, Keys: []string{"Control", "v"}}, computer.Action{Type: computer.Key, Keys: []string{"Control", "v"}})
	do(computer.Action{Type: computer.Screenshot})
	time.Sleep(2 * time.Second)
	t0 = time.Now()
	if _, err := p.Create(t.Context(), providers.Spec{VM: "b", Fence: 1}); err != nil {
		t.Fatal(err)
	}
	t.Log("create warm", time.Since(t0))
	t0 = time.Now()
	if err := p.Kill(t.Context(), "a"); err != nil {
		t.Fatal(err)
	}
	t.Log("kill", time.Since(t0))
	v, err := p.Observe(t.Context(), "b")
	if err != nil {
		t.Fatal(err)
	}
	_ = v
	p.Kill(t.Context(), "b")
	t0 = time.Now()
	t.Log(p.Close(), time.Since(t0))
}
