package computer

import "time"

// Bounds of one command, beside the time that its actions ask for. No command
// of a server in order takes as long; one whose server hangs does. The worker
// keeps them, and who waits for a result goes by them, so that nobody gives a
// command up that its worker still runs.
const (
	ObserveTime = 30 * time.Second // for a sandbox to be looked at
	PictureTime = 15 * time.Second // for one picture to be stored
)

const (
	actBase    = time.Minute
	actionTime = 5 * time.Second       // each
	openTime   = 45 * time.Second      // a page that loads slowly
	charTime   = 20 * time.Millisecond // per UTF-8 byte of a text that is typed
	judgeTime  = 30 * time.Second      // for calls that outlast their end, and one more look at the sandbox
)

// ActTime bounds how long a server may take to run the actions of one act: a
// minute, and for each action 5 s, the seconds that it gives (run: 60 where it
// gives none), 45 s for an open, and 20 ms for each byte of a text that is
// typed. A worker gives the act up then, as unknown.
func ActTime(actions []Action) time.Duration {
	total := actBase
	for _, a := range actions {
		total += actionTime
		switch a.Type {
		case Run:
			total += seconds(a.Duration(DefaultRun))
		case Wait, Hold:
			total += seconds(a.Duration(0))
		case Open:
			total += openTime
		case TypeText:
			if a.Text != nil {
				total += time.Duration(len(*a.Text)) * charTime
			}
		}
	}
	return total
}

// FinishTime bounds how long after its claim a worker that lives and reaches
// the bus says what became of an act, or of an observation (no actions):
// ActTime, then the pictures of the actions stored, and one more taken and
// stored.
func FinishTime(actions []Action) time.Duration {
	pictures := 1
	for _, a := range actions {
		if a.Type == Screenshot || a.Type == Zoom {
			pictures++
		}
	}
	return ActTime(actions) + judgeTime + ObserveTime + time.Duration(pictures)*PictureTime
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }
