package providertest

import (
	"bytes"
	"context"
	"errors"
	"image/png"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"berth/internal/computer"
	"berth/internal/providers"
	"berth/internal/virtualtime"
)

func click(x, y int) computer.Action {
	return computer.Action{Type: computer.Click, X: &x, Y: &y, Button: computer.Left, Count: 1}
}

func wait(seconds float64) computer.Action {
	return computer.Action{Type: computer.Wait, Seconds: &seconds}
}

func mustCreate(t *testing.T, p providers.Provider, vm string, fence uint64) providers.Sandbox {
	t.Helper()
	s, err := p.Create(t.Context(), providers.Spec{VM: vm, Fence: fence})
	if err != nil {
		t.Fatalf("create %s: %v", vm, err)
	}
	return s
}

func TestFakeVirtualTime(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		f := NewFake(FakeOptions{})
		p := f.Provider()
		f.Inject("Create", "", 1, Injection{Latency: 3 * time.Second})
		start := time.Now()
		mustCreate(t, p, "a", 1)
		if d := time.Since(start); d != 3*time.Second {
			t.Errorf("create took %s, want 3s", d)
		}
		if _, err := p.Execute(t.Context(), providers.Batch{VM: "a", Key: "k", Actions: []computer.Action{click(0, 0), wait(10), click(1, 1)}}); err != nil {
			t.Fatal(err)
		}
		if d := time.Since(start); d != 13*time.Second {
			t.Errorf("%s passed, want 13s", d)
		}
		if n := len(f.Effects()); n != 3 {
			t.Errorf("%d effects, want 3", n)
		}
	})
}

func TestFakePicture(t *testing.T) {
	f := NewFake(FakeOptions{})
	p := f.Provider()
	mustCreate(t, p, "a", 1)
	look := func() []byte {
		v, err := p.Observe(t.Context(), "a")
		if err != nil {
			t.Fatal(err)
		}
		img, err := png.Decode(bytes.NewReader(v.PNG))
		if err != nil {
			t.Fatal(err)
		}
		if img.Bounds().Dx() != 1280 || img.Bounds().Dy() != 800 {
			t.Errorf("picture is %v", img.Bounds())
		}
		return v.PNG
	}
	before := look()
	if !bytes.Equal(before, look()) {
		t.Error("the picture changed although nothing happened")
	}
	if _, err := p.Execute(t.Context(), providers.Batch{VM: "a", Actions: []computer.Action{click(5, 5)}}); err != nil {
		t.Fatal(err)
	}
	if bytes.Equal(before, look()) {
		t.Error("the picture did not change after a click")
	}
}

func TestFakeKillFreesHungCall(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		f := NewFake(FakeOptions{})
		p := f.Provider()
		mustCreate(t, p, "a", 1)
		f.Inject("Action", "a", 1, Injection{Hang: true})
		var wg sync.WaitGroup
		wg.Go(func() {
			_, err := p.Execute(t.Context(), providers.Batch{VM: "a", Actions: []computer.Action{click(1, 1)}})
			if !errors.Is(err, providers.ErrLost) {
				t.Errorf("hung call ended with %v, want ErrLost", err)
			}
		})
		synctest.Wait()
		if err := p.Kill(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		if n := len(f.Effects()); n != 0 {
			t.Errorf("%d effects, want none", n)
		}
		if l := f.Lives(); len(l) != 1 || l[0].Why != "killed" {
			t.Errorf("lives: %+v", l)
		}
	})
}

func TestFakeKillDuringCreate(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		f := NewFake(FakeOptions{Capacity: 1})
		p := f.Provider()
		f.Inject("Create", "a", 1, Injection{Hang: true})
		var wg sync.WaitGroup
		wg.Go(func() {
			if _, err := p.Create(t.Context(), providers.Spec{VM: "a", Fence: 1}); !errors.Is(err, providers.ErrLost) {
				t.Errorf("create ended with %v, want ErrLost", err)
			}
		})
		synctest.Wait()
		if _, err := p.Create(t.Context(), providers.Spec{VM: "b", Fence: 1}); !errors.Is(err, providers.ErrFull) {
			t.Errorf("over capacity: %v, want ErrFull", err)
		}
		if err := p.Kill(t.Context(), "a"); err != nil {
			t.Fatal(err)
		}
		wg.Wait()
		mustCreate(t, p, "b", 1)
		if f.Peak() != 1 {
			t.Errorf("peak %d, want 1", f.Peak())
		}
	})
}

// A worker that crashes in mid-batch leaves the server, and a successor asks it.
func TestFakeOutlivesClient(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		f := NewFake(FakeOptions{Recall: true, CheckFences: true, Detached: true})
		defer f.Shutdown()
		old, successor := f.Provider(), f.Provider()
		mustCreate(t, old, "a", 7)
		batch := providers.Batch{VM: "a", Fence: 7, Epoch: 1, Key: "k", Actions: []computer.Action{click(1, 1), wait(5), click(2, 2)}}
		ctx, crash := context.WithTimeout(t.Context(), time.Second)
		defer crash()
		if _, err := old.Execute(ctx, batch); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatalf("crashed worker got %v", err)
		}
		rec, err := successor.Recall(t.Context(), "a", "k")
		if err != nil || rec.Finished {
			t.Fatalf("recall: %+v, %v; want started", rec, err)
		}
		batch.Epoch = 2
		results, err := successor.Execute(t.Context(), batch) // waits for the first
		if err != nil || len(results) != 3 {
			t.Fatalf("same key: %v, %v", results, err)
		}
		if n := len(f.Effects()); n != 3 {
			t.Errorf("%d effects, want 3: the batch ran twice", n)
		}
		f.RegisterEpoch(2)
		batch.Epoch, batch.Key = 1, "late"
		if _, err := old.Execute(t.Context(), batch); !errors.Is(err, providers.ErrFenceStale) {
			t.Errorf("old epoch: %v, want ErrFenceStale", err)
		}
		batch.Epoch, batch.Fence = 2, 6
		if _, err := successor.Execute(t.Context(), batch); !errors.Is(err, providers.ErrFenceStale) {
			t.Errorf("old fence: %v, want ErrFenceStale", err)
		}
	})
}

func TestFakeFaults(t *testing.T) {
	virtualtime.Test(t, func(t *testing.T) {
		f := NewFake(FakeOptions{})
		p := f.Provider()
		mustCreate(t, p, "a", 1)
		three := providers.Batch{VM: "a", Key: "k", Actions: []computer.Action{click(1, 1), click(2, 2), click(3, 3)}}

		f.OnCall(func(c Call) Injection {
			if c.Method == "Action" && c.Index == 1 {
				return Injection{Err: &computer.Fault{Code: "boom", Message: "as asked"}}
			}
			return Injection{}
		})
		rs, err := p.Execute(t.Context(), three)
		if err != nil || rs[0].Outcome != computer.OK || rs[1].Outcome != computer.Failed || rs[2].Outcome != computer.Skipped {
			t.Errorf("failing action: %v, %v", rs, err)
		}
		f.OnCall(nil)
		f.Inject("Execute", "a", 1, Injection{AnswerErr: providers.ErrTimeout})
		if _, err := p.Execute(t.Context(), three); !errors.Is(err, providers.ErrTimeout) {
			t.Errorf("lost answer: %v", err)
		}
		if n := len(f.Effects()); n != 4 {
			t.Errorf("%d effects, want 4", n)
		}
		before, err := p.Health(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		f.Reboot()
		after, err := p.Health(t.Context())
		if err != nil || after == before {
			t.Errorf("boot id %v → %v, %v", before, after, err)
		}
		if l, err := p.List(t.Context()); err != nil || len(l) != 0 {
			t.Errorf("after a reboot: %v, %v", l, err)
		}
		if err := p.SetTimeout(t.Context(), "a", time.Second); !errors.Is(err, providers.ErrNotFound) {
			t.Errorf("SetTimeout of none: %v", err)
		}
		if _, err := p.Create(t.Context(), providers.Spec{VM: "b", Fence: 2, Timeout: time.Minute}); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute) // virtual
		synctest.Wait()
		if _, err := p.Get(t.Context(), "b"); !errors.Is(err, providers.ErrNotFound) {
			t.Errorf("expired sandbox: %v", err)
		}
	})
}

func TestFakeContract(t *testing.T) {
	var last *Fake
	Exercise(t, func(t *testing.T) providers.Provider {
		last = NewFake(FakeOptions{CheckFences: true, Recall: true})
		p := last.Provider()
		t.Cleanup(func() {
			if err := p.Close(); err != nil {
				t.Error(err)
			}
		})
		return p
	}, Options{
		NoPages: true, ChecksFences: true, Recalls: true,
		NewLimited: func(t *testing.T) providers.Provider { return NewFake(FakeOptions{Capacity: 2}).Provider() },
		Crash:      func(t *testing.T, _ providers.Provider, vm string) { last.Crash(vm) },
	})
}
