package worker

// Point is a moment in a command's life at which a crash test may strike.
type Point string

// The points, in the order of a command's life.
const (
	AfterClaim   Point = "afterClaim"   // claimed, nothing begun
	AfterExecute Point = "afterExecute" // the provider has answered an act
	AfterCreate  Point = "afterCreate"  // the sandbox exists
	AfterKill    Point = "afterKill"    // the sandbox is gone
	AfterUpload  Point = "afterUpload"  // a picture is stored
	BeforeFinish Point = "beforeFinish" // all is known, nothing said
	BeforeAck    Point = "beforeAck"    // finished, not acknowledged
	InRecovery   Point = "inRecovery"   // a dead worker's claim is about to be resolved
)

// Points lists them; a crash test visits each.
var Points = []Point{AfterClaim, AfterExecute, AfterCreate, AfterKill, AfterUpload, BeforeFinish, BeforeAck, InRecovery}

func (t *tenure) at(p Point, vm string) {
	if t.w.opts.Hook != nil {
		t.w.opts.Hook(p, vm)
	}
}
