package registry

import (
	"fmt"
)

// Missing returns an error for every server whose provider this build does
// not have. A worker reports them all at its start, before it takes a lease.
func Missing(servers []Server) []error {
	var errs []error
	for _, s := range servers {
		if s.Kind != Playwright {
			errs = append(errs, fmt.Errorf("server %s: this build has no provider %q yet; give the server \"provider\": \"playwright\" (a browser on the worker's machine), or leave it out with SANDBOX_SERVER_ID", s.ID, s.Kind))
		}
	}
	return errs
}
