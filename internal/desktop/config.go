package desktop

import (
	_ "embed"
	"fmt"
	"os"
	"path/filepath"
)

//go:embed openbox.xml
var openboxConfig []byte

//go:embed menu.xml
var openboxMenu []byte

// writeConfig lays out the person's home: the window manager's configuration
// and the runtime directory.
func (s *Session) writeConfig() error {
	own := func(path string) error {
		if s.person.UID == 0 {
			return nil
		}
		return os.Chown(path, s.person.UID, s.person.GID)
	}
	for _, dir := range []string{".run", ".config", ".config/openbox"} {
		path := filepath.Join(s.person.Home, dir)
		if err := os.MkdirAll(path, 0o700); err != nil {
			return fmt.Errorf("lay out the home directory: %w", err)
		}
		if err := own(path); err != nil {
			return fmt.Errorf("lay out the home directory: %w", err)
		}
	}
	for name, data := range map[string][]byte{"rc.xml": openboxConfig, "menu.xml": openboxMenu} {
		path := filepath.Join(s.person.Home, ".config/openbox", name)
		if err := os.WriteFile(path, data, 0o644); err != nil {
			return fmt.Errorf("write the window manager's configuration: %w", err)
		}
		if err := own(path); err != nil {
			return fmt.Errorf("write the window manager's configuration: %w", err)
		}
	}
	return nil
}
