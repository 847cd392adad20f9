package playwright

import (
	"context"

	"berth/internal/computer"
)

// selectStyle makes the select element under the pointer one whose list is a
// part of the page.
const selectStyle = `select:is(:hover, :open):not([multiple]):not([size]:not([size="1"])),
select:is(:hover, :open):not([multiple]):not([size]:not([size="1"]))::picker(select) { appearance: base-select !important; }`

// prepareSelect makes the list of a select element that is about to be clicked
// one that takes clicks. Chromium shows the native list in a window of its own:
// it is in the picture, but CDP's input does not reach it. So for the time that
// the pointer is on the element or its list is open, a style sheet of the
// inspector's (none of the document's: no script sees it) gives it the list
// that CSS calls base-select, which is drawn in the page. The element looks a
// little different meanwhile. A click elsewhere takes the style back. Elements
// in frames of other processes, and browsers older than 135, keep the native
// list. A fault here is no fault of the click.
func (r *run) prepareSelect(ctx context.Context, at computer.Point) error {
	var node struct {
		BackendNodeID int    `json:"backendNodeId"`
		FrameID       string `json:"frameId"`
	}
	err := r.conn.cdp.call(ctx, r.page.session, "DOM.getNodeForLocation", params{"x": at.X, "y": at.Y, "ignorePointerEventsNone": false}, &node)
	if err != nil {
		return context.Cause(ctx)
	}
	var described struct {
		Node struct {
			NodeName string `json:"nodeName"`
		} `json:"node"`
	}
	if err := r.conn.cdp.call(ctx, r.page.session, "DOM.describeNode", params{"backendNodeId": node.BackendNodeID}, &described); err != nil {
		return context.Cause(ctx)
	}
	name := described.Node.NodeName
	switch {
	case name == "SELECT":
		r.page.styled = node.FrameID
		return r.style(ctx, node.FrameID, selectStyle)
	case r.page.styled != "" && name != "OPTION" && name != "OPTGROUP":
		frame := r.page.styled
		r.page.styled = ""
		return r.style(ctx, frame, "")
	}
	return nil
}

// style sets the text of a frame's inspector style sheet. It returns ctx's
// error only.
func (r *run) style(ctx context.Context, frame, text string) error {
	var sheet struct {
		ID string `json:"styleSheetId"`
	}
	err := r.conn.cdp.call(ctx, r.page.session, "CSS.enable", nil, nil)
	if err == nil {
		err = r.conn.cdp.call(ctx, r.page.session, "CSS.createStyleSheet", params{"frameId": frame}, &sheet)
	}
	if err == nil {
		err = r.conn.cdp.call(ctx, r.page.session, "CSS.setStyleSheetText", params{"styleSheetId": sheet.ID, "text": text}, nil)
	}
	if err == nil {
		err = r.conn.cdp.call(ctx, r.page.session, "CSS.disable", nil, nil)
	}
	if err != nil && ctx.Err() == nil {
		r.p.log.Debug("a select element keeps its native list", "vm", r.vm(), "error", err)
	}
	return context.Cause(ctx)
}
