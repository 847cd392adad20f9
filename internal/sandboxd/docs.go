package sandboxd

import (
	"bytes"
	"fmt"
	"html/template"
	"net/http"
	"slices"
	"strings"
	"sync"

	"go.yaml.in/yaml/v3"

	"berth/api"
)

// docsPage shows the API's description. It needs nothing from elsewhere.
var docsPage = template.Must(template.New("docs").Parse(`<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{{.Title}}</title>
<style>
  body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto; padding: 1rem; color: #1c2430; background: #fff; }
  h2 { margin-top: 2.5rem; } h3 { font-size: 1rem; }
  code, pre { font: 14px/1.45 ui-monospace, monospace; } pre { background: #f2f4f7; padding: .75rem; overflow: auto; }
  details { border: 1px solid #d5dbe3; border-radius: 6px; padding: .5rem .75rem; margin: .5rem 0; }
  summary { cursor: pointer; } .method { display: inline-block; min-width: 4.5rem; font-weight: 700; }
  td { vertical-align: top; padding: .15rem 1rem .15rem 0; } p { white-space: pre-line; margin: .5rem 0; }
  @media (prefers-color-scheme: dark) { body { color: #dce3ec; background: #14181e; } pre { background: #1f2630; } details { border-color: #3a4553; } a { color: #8ab8ff; } }
</style>
<h1>{{.Title}}</h1>
<p>{{.Description}}</p>
<p><a href="/openapi.yaml">openapi.yaml</a> describes the same for programs.</p>
<h2>Calls</h2>
{{range .Calls}}<details id="{{.ID}}">
<summary><span class="method">{{.Method}}</span> <code>{{.Path}}</code> – {{.Summary}}</summary>
<p>{{.Description}}</p>
{{if .Parameters}}<h3>Parameters</h3><pre>{{.Parameters}}</pre>{{end}}
{{if .Body}}<h3>Body</h3><pre>{{.Body}}</pre>{{end}}
<h3>Answers</h3>
<table>{{range .Answers}}<tr><td><code>{{.Status}}</code></td><td>{{.Description}}{{if .Schema}}<pre>{{.Schema}}</pre>{{end}}</td></tr>{{end}}</table>
</details>
{{end}}
<h2>Schemas</h2>
{{range .Schemas}}<details id="schema-{{.Name}}"><summary><code>{{.Name}}</code></summary><pre>{{.Text}}</pre></details>
{{end}}
</html>
`))

type docsCall struct {
	ID, Method, Path, Summary, Description, Parameters, Body string
	Answers                                                  []docsAnswer
}

type docsAnswer struct{ Status, Description, Schema string }

type docsSchema struct{ Name, Text string }

// renderedDocs makes the page once.
var renderedDocs = sync.OnceValues(func() ([]byte, error) { return renderDocs(api.Sandboxd) })

// renderDocs makes the page from an OpenAPI description.
func renderDocs(description []byte) ([]byte, error) {
	var root yaml.Node
	if err := yaml.Unmarshal(description, &root); err != nil {
		return nil, fmt.Errorf("read the API's description: %w", err)
	}
	d := docsReader{root: root.Content[0]}
	page := struct {
		Title, Description string
		Calls              []docsCall
		Schemas            []docsSchema
	}{Title: d.text(d.root, "info", "title"), Description: d.text(d.root, "info", "description")}
	d.each(child(d.root, "paths"), func(path string, item *yaml.Node) {
		d.each(item, func(method string, op *yaml.Node) {
			if slices.Contains([]string{"get", "post", "put", "delete"}, method) {
				page.Calls = append(page.Calls, d.call(path, method, item, op))
			}
		})
	})
	d.each(child(d.root, "components", "schemas"), func(name string, schema *yaml.Node) {
		page.Schemas = append(page.Schemas, docsSchema{name, d.yaml(schema)})
	})
	if d.err != nil {
		return nil, d.err
	}
	var out bytes.Buffer
	if err := docsPage.Execute(&out, page); err != nil {
		return nil, fmt.Errorf("make the page: %w", err)
	}
	return out.Bytes(), nil
}

// docsReader walks a description; the first error stays.
type docsReader struct {
	root *yaml.Node
	err  error
}

// child follows keys down from n; nil where there is none.
func child(n *yaml.Node, keys ...string) *yaml.Node {
	for _, key := range keys {
		if n == nil || n.Kind != yaml.MappingNode {
			return nil
		}
		var next *yaml.Node
		for i := 0; i+1 < len(n.Content); i += 2 {
			if n.Content[i].Value == key {
				next = n.Content[i+1]
			}
		}
		n = next
	}
	return n
}

// resolve follows a reference within the description.
func (d *docsReader) resolve(n *yaml.Node) *yaml.Node {
	if ref := child(n, "$ref"); ref != nil {
		return child(d.root, strings.Split(strings.TrimPrefix(ref.Value, "#/"), "/")...)
	}
	return n
}

func (d *docsReader) text(n *yaml.Node, keys ...string) string {
	if n = child(n, keys...); n == nil {
		return ""
	}
	return strings.TrimSpace(n.Value)
}

func (d *docsReader) each(n *yaml.Node, f func(key string, value *yaml.Node)) {
	for i := 0; n != nil && i+1 < len(n.Content); i += 2 {
		f(n.Content[i].Value, n.Content[i+1])
	}
}

func (d *docsReader) yaml(n *yaml.Node) string {
	if n == nil {
		return ""
	}
	raw, err := yaml.Marshal(n)
	if err != nil && d.err == nil {
		d.err = fmt.Errorf("write a part of the API's description: %w", err)
	}
	return strings.TrimSpace(string(raw))
}

func (d *docsReader) call(path, method string, item, op *yaml.Node) docsCall {
	c := docsCall{
		ID: d.text(op, "operationId"), Method: strings.ToUpper(method), Path: path, Summary: d.text(op, "summary"), Description: d.text(op, "description"),
		Body: d.yaml(child(op, "requestBody", "content", "application/json", "schema")),
	}
	var parameters []string
	for _, list := range []*yaml.Node{child(item, "parameters"), child(op, "parameters")} {
		for i := 0; list != nil && i < len(list.Content); i++ {
			parameters = append(parameters, d.yaml(d.resolve(list.Content[i])))
		}
	}
	c.Parameters = strings.Join(parameters, "\n\n")
	d.each(child(op, "responses"), func(status string, answer *yaml.Node) {
		answer = d.resolve(answer)
		schema := d.yaml(child(answer, "content", "application/json", "schema"))
		if strings.Contains(schema, "schemas/Error") {
			schema = ""
		}
		c.Answers = append(c.Answers, docsAnswer{status, d.text(answer, "description"), schema})
	})
	return c
}

func (s *Server) docs(w http.ResponseWriter, _ *http.Request) {
	page, err := renderedDocs()
	if err != nil {
		s.json(w, http.StatusInternalServerError, errorBody{Code: 500, Message: err.Error()})
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Header().Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'")
	s.write(w, http.StatusOK, page)
}

func (s *Server) openAPI(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/yaml")
	s.write(w, http.StatusOK, api.Sandboxd)
}
