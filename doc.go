// Package berth holds the repository's own tests; the programs are below cmd,
// what they are made of below internal. See README.md.
package berth
