package playwright

// FindBrowser returns the browser that New would use where Options name none,
// or an error that says how to get one.
func FindBrowser() (string, error) { return findExecutable("") }
