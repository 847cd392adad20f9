# Runs inside a sandbox, as one argument of bash -c: nothing that a caller gives
# is ever parsed as a command. $1 is the directory for its records, $2 what to
# do, $3 the batch's key. Frames of what it says are described in frames.go.
set -u
export LANG=C.UTF-8 DISPLAY="${DISPLAY:-:0}"
base=$1 verb=$2 key=$3
shift 3
dir=$base/keys/$key
interrupted= child=
trap 'interrupted=1' TERM
[ -d "$base/keys" ] || mkdir -p -m 700 "$base/keys" || exit 91

# lock serialises what acts on the sandbox, whoever sends it.
lock() {
	exec 9>>"$base/lock"
	flock 9 &
	wait $!
	[ -z "$interrupted" ]
}

# nap sleeps; a TERM ends it.
nap() {
	sleep "$1" 9>&- &
	wait $!
}

# say tells the caller a line of a batch, and the record. (Programs that need
# not be started are not: on a busy machine each costs more than xdotool does.)
say() {
	echo "$1"
	echo "$1" >>"$dir/log"
}

# spawn runs a program in a session of its own for at most $1 ms, with $2
# (base64) as its input. A TERM kills the session.
spawn() {
	local limit in=$2
	printf -v limit '%d.%03d' $(($1 / 1000)) $(($1 % 1000))
	shift 2
	local from=/dev/null
	if [ -n "$in" ]; then
		from=$dir/in
		base64 -d <<<"$in" >"$from"
	fi
	setsid timeout --kill-after=1 "$limit" "$@" <"$from" >"$dir/out" 2>"$dir/err" 9>&- &
	child=$!
	wait "$child"
	code=$?
	if [ -n "$interrupted" ]; then
		kill -KILL -- "-$child" 2>/dev/null
		wait "$child" 2>/dev/null
	fi
}

# run_program: directory, number of variables, variables, program, arguments.
run_program() {
	local limit=$1 in=$2 cwd=$3 n=$4
	shift 4
	local env=("${@:1:n}")
	shift "$n"
	[ -d "$cwd" ] || { code=nodir; return; }
	case $1 in
	*/*) [ -f "$1" ] || [ -f "$cwd/$1" ] || { code=noprogram; return; } ;;
	*) type -P -- "$1" >/dev/null || { code=noprogram; return; } ;;
	esac
	cd -- "$cwd" || { code=nodir; return; }
	spawn "$limit" "$in" env -- ${env[@]+"${env[@]}"} "$@"
	cd /
}

# map_keys gives key symbols that the layout lacks a key of their own. A key
# that has another symbol is used again only after programs had time to see it: a
# second, and longer on a machine on which a look at the pointer takes long.
map_keys() {
	local sym code at next n tries again= args=()
	local -A code_of=() sym_of=() wanted=()
	[ -s "$base/free" ] || xmodmap -pke | awk 'NF == 3 && $2 > 8 { print $2 }' >"$base/free"
	local free
	mapfile -t free <"$base/free"
	n=${#free[@]}
	[ "$n" -ge "$#" ] || return 1
	if [ -f "$base/keymap" ]; then
		while read -r at sym; do code_of[$sym]=$at sym_of[$at]=$sym; done <"$base/keymap"
	fi
	read -r next 2>/dev/null <"$base/next" || next=0
	for sym; do wanted[$sym]=1; done
	for sym; do
		[ -z "${code_of[$sym]:-}" ] || continue
		for ((tries = 0; tries < n; tries++)); do
			at=${free[next % n]} next=$(((next + 1) % n))
			[ -z "${sym_of[$at]:-}" ] || [ -z "${wanted[${sym_of[$at]}]:-}" ] || continue
			break
		done
		if [ -n "${sym_of[$at]:-}" ]; then
			again=1
			unset "code_of[${sym_of[$at]}]"
		fi
		sym_of[$at]=$sym code_of[$sym]=$at
		args+=(-e "keycode $at = $sym $sym $sym $sym")
	done
	[ ${#args[@]} -gt 0 ] || return 0
	if [ -n "$again" ]; then
		n=${EPOCHREALTIME/[.,]/}
		timeout 5 xdotool getmouselocation >/dev/null 2>&1
		n=$(((${EPOCHREALTIME/[.,]/} - n) / 50000)) # seconds: twenty times what it took
		nap $((n < 1 ? 1 : n > 5 ? 5 : n))
	fi
	timeout 10 xmodmap "${args[@]}" || return 1
	for at in "${!sym_of[@]}"; do echo "$at ${sym_of[$at]}"; done >"$base/keymap"
	echo "$next" >"$base/next"
}

# windows tells the windows apart, for open to see that something was shown.
windows() {
	timeout 5 xprop -root _NET_CLIENT_LIST_STACKING _NET_ACTIVE_WINDOW
	timeout 5 xdotool getactivewindow getwindowname 2>/dev/null
}

# opener_of_addresses is a browser itself, where there is one: what xdg-open does
# with addresses depends on the desktop's settings, and may be a question.
opener_of_addresses() {
	local p
	for p in google-chrome google-chrome-stable chromium chromium-browser; do
		if type -P "$p" >/dev/null; then
			opener=("$p" --no-first-run --no-default-browser-check --password-store=basic --start-maximized)
			return
		fi
	done
	! type -P firefox >/dev/null || opener=(firefox)
}

# open_target shows a target and returns when a window has come or changed and
# none has changed for a while. A program that has ended well had handed over.
open_target() {
	local limit=$1 kind=$2 target=$3 before now tick ended= still=0
	: >"$dir/out"
	if [ "$kind" = file ]; then
		case $target in /*) ;; *) target=$HOME/$target ;; esac
		[ -e "$target" ] || { code=nofile; return; }
	fi
	before=$(windows)
	local opener=(xdg-open)
	[ "$kind" = file ] || opener_of_addresses
	(cd && exec setsid "${opener[@]}" "$target") </dev/null >/dev/null 2>"$dir/err" 9>&- &
	child=$!
	for ((tick = 0; tick < limit / 100; tick++)); do
		nap 0.1
		[ -z "$interrupted" ] || return
		if [ -z "$ended" ] && ! kill -0 "$child" 2>/dev/null; then
			wait "$child"
			code=$? ended=$tick
			[ "$code" = 0 ] || return
		fi
		now=$(windows)
		if [ "$now" != "$before" ]; then
			before=$now still=1
		elif [ "$still" -gt 0 ]; then
			still=$((still + 1))
		fi
		code=0
		[ "$still" -lt 6 ] || return
		[ -z "$ended" ] || [ "$still" -gt 0 ] || [ $((tick - ended)) -lt 30 ] || return
	done
	[ "$still" -gt 0 ] || code=nowindow
}

# point moves the pointer, waits until it has arrived, and does the rest. A window
# manager that looks at a click first holds up all that follows it: what was
# pressed before the pointer had moved would happen elsewhere.
point() {
	local limit=$1 x=$2 y=$3 at=0 until=$((${EPOCHREALTIME/[.,]/} + 3000000))
	shift 3
	spawn "$limit" "" xdotool mousemove "$x" "$y" getmouselocation
	while [ -z "$interrupted" ] && [ "$code" = 0 ]; do
		read -r at <"$dir/out"
		[[ $at != "x:$x y:$y "* ]] && [ "${EPOCHREALTIME/[.,]/}" -lt "$until" ] || break
		nap 0.01
		spawn "$limit" "" xdotool getmouselocation
	done
	: >"$dir/out"
	[ -n "$interrupted" ] || [ "$code" != 0 ] || [ $# = 0 ] || spawn "$limit" "" xdotool "$@"
}

release() {
	[ "$#" -eq 0 ] || timeout --kill-after=1 5 xdotool "$@" </dev/null >/dev/null 2>&1
}

# step runs one step and frames what became of it.
step() {
	local i=$1 kind=$2 limit=$3 in=$4 began=${EPOCHREALTIME/[.,]/} out=0 err=0 ms
	shift 4
	code=0
	: >"$dir/out"
	: >"$dir/err"
	case $kind in
	run) run_program "$limit" "$in" "$@" ;;
	shot)
		rm -f "$dir/shot.png"
		spawn "$limit" "" scrot --pointer "$dir/shot.png"
		;;
	map) map_keys "$@" || code=nokeys ;;
	open) open_target "$limit" "$@" ;;
	point) point "$limit" "$@" ;;
	put) spawn "$limit" "$in" "$@" && : >"$dir/out" ;;
	*) spawn "$limit" "$in" "$@" ;;
	esac
	ms=$(((${EPOCHREALTIME/[.,]/} - began) / 1000))
	[ -z "$interrupted" ] || return
	case $kind:$code in
	run:124 | run:137) [ "$ms" -lt "$limit" ] || code=noend ;;
	clip:1) code=0 ;; # there is none
	esac
	if [ "$kind" = shot ] && [ "$code" = 0 ]; then
		out=$(stat -c %s "$dir/shot.png") || { code=1 out=0; }
		printf 'P %s %s %s %s 0\n' "$i" "$code" "$ms" "$out"
		[ "$out" = 0 ] || cat "$dir/shot.png"
		printf 'Q %s %s %s 0 0\n' "$i" "$code" "$ms" >>"$dir/log"
		rm -f "$dir/shot.png"
		return
	fi
	[ ! -s "$dir/out" ] || out=$(stat -c %s "$dir/out")
	[ ! -s "$dir/err" ] || err=$(stat -c %s "$dir/err")
	[ "$out" -le 65537 ] || out=65537
	[ "$err" -le 65537 ] || err=65537
	say "E $i $kind $code $ms $out $err"
	[ "$out" = 0 ] || head -c "$out" "$dir/out" | tee -a "$dir/log"
	[ "$err" = 0 ] || head -c "$err" "$dir/err" | tee -a "$dir/log"
}

# act: epoch, number of actions, number of words that release everything, those
# words, and the steps: action, kind, milliseconds, input, number of words, words.
act() {
	local epoch=$1 actions=$2 n=$3 have=0
	shift 3
	local letgo=("${@:1:n}")
	shift "$n"
	lock || exit 0
	read -r have 2>/dev/null <"$base/epoch"
	if [ "$epoch" -gt 0 ] && [ "$epoch" -lt "${have:-0}" ]; then
		echo "X"
		exit 0
	fi
	[ "$epoch" -le "${have:-0}" ] || echo "$epoch" >"$base/epoch"
	mkdir "$dir" 2>/dev/null || { echo "D"; exit 0; }
	echo $$ >"$dir/pid"
	if [ -f "$base/current" ]; then # one that was killed outright
		local stale
		mapfile -t stale <"$base/current"
		release "${stale[@]}"
	fi
	printf '%s\n' "${letgo[@]}" >"$base/current"
	say "B $actions"
	while [ $# -gt 0 ]; do
		local i=$1 kind=$2 limit=$3 in=$4 words=$5
		shift 5
		say "S $i"
		step "$i" "$kind" "$limit" "$in" "${@:1:words}"
		shift "$words"
		if [ -n "$interrupted" ]; then
			release "${letgo[@]}"
			say "I $i"
			break
		fi
		if [ "$kind" != run ] && [ "$code" != 0 ] || [[ $code == no* ]]; then
			release "${letgo[@]}"
			break
		fi
	done
	say "F"
	: >"$dir/done"
	rm -f "$base/current" "$dir/in" "$dir/out" "$dir/err"
	local logs=("$base/keys"/*/log)
	[ ${#logs[@]} -le 120 ] || ls -1t "${logs[@]}" | tail -n +101 | while read -r old; do rm -f "$old"; done
}

# alive tells whether the batch's process runs.
alive() {
	local pid
	read -r pid 2>/dev/null <"$dir/pid" && tr '\0' ' ' 2>/dev/null <"/proc/$pid/cmdline" | grep -qF " act $key "
}

recall() {
	if [ ! -d "$dir" ]; then
		echo "N"
	elif [ -f "$dir/revoked" ]; then
		echo "R"
	elif [ ! -f "$dir/done" ] && { alive || [ ! -f "$dir/pid" ]; }; then
		echo "T running"
	elif [ -f "$dir/done" ]; then # also where it has just come: a batch says so before it ends
		[ -f "$dir/log" ] && { echo "T done"; cat "$dir/log"; } || echo "N"
	else
		echo "T dead"
		cat "$dir/log" 2>/dev/null
	fi
}

# revoke makes sure that a batch does not begin any more, or ends it.
revoke() {
	local tick pid
	if mkdir "$dir" 2>/dev/null; then
		: >"$dir/revoked"
	else
		for ((tick = 0; tick < 20; tick++)); do
			[ ! -f "$dir/done" ] || break
			if alive; then
				read -r pid <"$dir/pid"
				[ "$tick" -gt 0 ] || kill -TERM "$pid" 2>/dev/null
			fi
			sleep 0.05
		done
	fi
	recall
}

# state tells whether the desktop was ready to use; ready says that it is.
state() { [ -f "$base/ready" ] && echo "Z" || echo "M"; }
ready() { : >"$base/ready"; }

# look frames a picture, the pointer and the active window's title.
look() {
	local file=$base/look.$$.png at title size
	timeout --kill-after=1 20 scrot --pointer "$file" >&2 || { rm -f "$file"; exit 92; }
	at=$(timeout 5 xdotool getmouselocation | sed -n 's/^x:\([0-9]*\) y:\([0-9]*\) .*/\1 \2/p')
	title=$(timeout 5 xdotool getactivewindow getwindowname 2>/dev/null | head -c 1024)
	size=$(stat -c %s "$file")
	printf 'L %s %s %s\n%s' "${at:--1 -1}" "$(printf %s "$title" | wc -c)" "$size" "$title"
	cat "$file"
	rm -f "$file"
}

# desktop starts X server and desktop environment as E2B's desktop client does,
# unless the template has done so, and says the screen's size.
desktop() {
	local size=$1 missing=() p tick
	shift
	lock || exit 0
	for p in xdotool scrot xmodmap xdpyinfo xprop xdg-open flock setsid timeout base64 "$@"; do
		type -P "$p" >/dev/null || missing+=("$p")
	done
	if ! timeout 10 xdpyinfo >/dev/null 2>&1; then
		type -P Xvfb >/dev/null || missing+=(Xvfb)
		if [ ${#missing[@]} = 0 ]; then
			setsid Xvfb "$DISPLAY" -ac -screen 0 "${size}x24" -dpi 96 -nolisten tcp -noreset -s 0 </dev/null >"$base/xvfb.log" 2>&1 9>&- &
			child=$!
			for ((tick = 0; tick < 600; tick++)); do
				timeout 10 xdpyinfo >/dev/null 2>&1 && break
				kill -0 "$child" 2>/dev/null || break
				nap 0.05
				[ -z "$interrupted" ] || exit 0
			done
			timeout 10 xdpyinfo >/dev/null 2>&1 || { echo "M the X server does not start: $(head -c 300 "$base/xvfb.log" | tr '\n' ' ')"; exit 0; }
		fi
	fi
	if [ ${#missing[@]} -gt 0 ]; then
		echo "M the template lacks ${missing[*]}"
		exit 0
	fi
	xmodmap -pke | awk 'NF == 3 && $2 > 8 { print $2 }' >"$base/free"
	if ! managed; then
		if type -P startxfce4 >/dev/null; then
			(cd && exec setsid startxfce4) </dev/null >"$base/desktop.log" 2>&1 9>&- &
		elif type -P openbox >/dev/null; then
			(cd && exec setsid openbox) </dev/null >"$base/desktop.log" 2>&1 9>&- &
		else
			echo "M the template has neither startxfce4 nor openbox"
			exit 0
		fi
		for ((tick = 0; tick < 1200; tick++)); do
			managed && break
			nap 0.05
			[ -z "$interrupted" ] || exit 0
		done
		managed || { echo "M the desktop does not start: $(tail -c 300 "$base/desktop.log" | tr '\n' ' ')"; exit 0; }
	fi
	echo "Z $(xdpyinfo | awk '/dimensions:/ { print $2; exit }')"
}

# managed: a window manager serves, and where it is XFCE its desktop is shown.
managed() {
	timeout 10 xprop -root _NET_SUPPORTING_WM_CHECK 2>/dev/null | grep -q '# 0x' || return
	! type -P startxfce4 >/dev/null || ! pgrep -x xfce4-session >/dev/null || timeout 10 xdotool search --onlyvisible --class xfdesktop >/dev/null 2>&1
}

# stream starts the live view: x11vnc, to look on only, and noVNC.
stream() {
	local password=$1 port=$2 tick proxy=/opt/noVNC/utils/novnc_proxy
	lock || exit 0
	for p in x11vnc "$proxy"; do type -P "$p" >/dev/null || { echo "M the template lacks $p"; exit 0; }; done
	if ! pgrep -x x11vnc >/dev/null; then
		x11vnc -storepasswd "$password" "$base/vnc" >/dev/null 2>&1
		timeout 20 x11vnc -bg -display "$DISPLAY" -forever -wait 50 -shared -viewonly -localhost -rfbport 5900 -rfbauth "$base/vnc" >/dev/null 2>"$base/x11vnc.log" 9>&- </dev/null
	fi
	if ! (: <>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
		(cd /opt/noVNC/utils && exec setsid ./novnc_proxy --vnc localhost:5900 --listen "$port" --web /opt/noVNC) </dev/null >"$base/novnc.log" 2>&1 9>&- &
	fi
	for ((tick = 0; tick < 400; tick++)); do
		if (: <>"/dev/tcp/127.0.0.1/$port") 2>/dev/null; then
			echo "Z"
			exit 0
		fi
		nap 0.05
	done
	echo "M the live view does not start: $(tail -c 300 "$base/novnc.log" | tr '\n' ' ')"
}

"$verb" "$@"
