package anthropic

import (
	"regexp"
	"strconv"
	"strings"

	sdk "github.com/anthropics/anthropic-sdk-go"

	"berth/internal/computer"
	"berth/internal/thinkers/screen"
)

// Tool versions, as the API names them.
const (
	Toolset20260801  = "computer_toolset_20260801"
	Computer20251124 = "computer_20251124"
	Computer20250124 = "computer_20250124"
	Computer20241022 = "computer_20241022"
)

// header is the beta header that a tool version needs.
var header = map[string]sdk.AnthropicBeta{
	Toolset20260801:  "",
	Computer20251124: sdk.AnthropicBetaComputerUse2025_11_24,
	Computer20250124: sdk.AnthropicBetaComputerUse2025_01_24,
	Computer20241022: sdk.AnthropicBetaComputerUse2024_10_22,
}

// profile is what Berth must know of a model.
type profile struct {
	tool     string
	limits   screen.Limits
	thinks   bool // thinks of its own accord, adaptively; takes no budget
	binds    bool // binds thinking to the conversation before it
	budgeted bool // takes a thinking budget
}

// maxImage is of a picture's bytes, before base64, at the API.
const maxImage = 3_700_000

var (
	standard = screen.Limits{Edge: 1568, Pixels: 1_150_000, Tokens: 1568, Bytes: maxImage}
	// large is the tier of Opus 4.7 and later models. 2000 px a side is the most
	// where a request has more than 20 pictures; it never has, see MaxPictures.
	large = screen.Limits{Edge: 2576, Tokens: 4784, Bytes: maxImage}
)

var named = regexp.MustCompile(`claude-(opus|sonnet|haiku|fable|mythos)-(\d{1,2})(?:[-.](\d{1,2}))?(?:\D|$)`)

// profileOf derives a model's profile from its id, by the tables of
// https://platform.claude.com/docs/en/agents-and-tools/tool-use/computer-use-tool
// (Earlier tool versions, Compatibility; read in November 2026). A name that it
// does not know is taken for a newer model than those tables.
func profileOf(id string) profile {
	newest := profile{tool: Toolset20260801, limits: large, thinks: true, binds: true}
	if strings.Contains(id, "claude-3-5") {
		return profile{tool: Computer20241022, limits: standard}
	}
	if strings.Contains(id, "claude-3-7") {
		return profile{tool: Computer20250124, limits: standard, budgeted: true}
	}
	m := named.FindStringSubmatch(id)
	if m == nil {
		return newest
	}
	family := m[1]
	version := atoi(m[2])*10 + atoi(m[3])
	switch {
	case version >= 55, version >= 51 && (family == "fable" || family == "mythos"):
		return newest
	case version >= 50:
		return profile{tool: Toolset20260801, limits: large, thinks: true}
	case family == "opus" && version >= 48:
		return profile{tool: Toolset20260801, limits: large}
	case family == "opus" && version == 47:
		return profile{tool: Computer20251124, limits: large}
	case family == "opus" && version >= 45, family == "sonnet" && version >= 46:
		return profile{tool: Computer20251124, limits: standard, budgeted: true}
	default:
		return profile{tool: Computer20250124, limits: standard, budgeted: true}
	}
}

func atoi(s string) int {
	n, err := strconv.Atoi(s)
	if err != nil { // the group is empty: a version without a minor part
		return 0
	}
	return n
}

// tool is the entry of a request for a tool version. sent is the size of the
// newest picture, which the older versions want to know.
func toolEntry(version string, sent screen.Size, zoom bool) sdk.BetaToolUnionParam {
	w, h := int64(sent.Width), int64(sent.Height)
	switch version {
	case Computer20251124:
		return sdk.BetaToolUnionParam{OfComputerUseTool20251124: &sdk.BetaToolComputerUse20251124Param{DisplayWidthPx: w, DisplayHeightPx: h, EnableZoom: sdk.Bool(zoom)}}
	case Computer20250124:
		return sdk.BetaToolUnionParam{OfComputerUseTool20250124: &sdk.BetaToolComputerUse20250124Param{DisplayWidthPx: w, DisplayHeightPx: h}}
	case Computer20241022:
		return sdk.BetaToolUnionParam{OfComputerUseTool20241022: &sdk.BetaToolComputerUse20241022Param{DisplayWidthPx: w, DisplayHeightPx: h}}
	default:
		set := &sdk.BetaComputerToolset20260801Param{}
		if !zoom {
			set.Configs.Zoom.Enabled = sdk.Bool(false)
		}
		return sdk.BetaToolUnionParam{OfComputerToolset20260801: set}
	}
}

// zoomAllowed reports whether the tool may offer zoom. Another action that is
// denied is answered as not allowed when it is called.
func zoomAllowed(deny []computer.Type) bool {
	for _, t := range deny {
		if t == computer.Zoom {
			return false
		}
	}
	return true
}
