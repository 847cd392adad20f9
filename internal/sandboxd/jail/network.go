package jail

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// closed are the address ranges that a sandbox does not reach: loopback of
// others, private and shared networks, link-local with the metadata services,
// benchmarking, multicast and reserved. Sources: RFC 6890, RFC 1112.
var closed = []string{
	"0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
	"192.168.0.0/16", "198.18.0.0/15", "224.0.0.0/4", "240.0.0.0/4",
}

// The network inside: slirp4netns' own, whose gateway stands for the host's
// loopback, which is disabled, and whose .3 answers DNS.
const (
	insideNet = "10.0.2.0/24"
	tap       = "tap0"
)

// networkWithin bounds the start of slirp4netns.
const networkWithin = 5 * time.Second

// blocked returns the routes that close off what is not open: the ranges above
// and the host's own addresses.
func blocked(open []string) ([]string, error) {
	var opened []netip.Prefix
	for _, text := range open {
		p, err := netip.ParsePrefix(text)
		if err != nil || !p.Addr().Is4() {
			return nil, fmt.Errorf("%q is no IPv4 range such as 192.168.7.0/24", text)
		}
		opened = append(opened, p.Masked())
	}
	addresses, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("read the host's addresses: %w", err)
	}
	routes := append([]string(nil), closed...)
	for _, a := range addresses {
		if n, ok := a.(*net.IPNet); ok && n.IP.To4() != nil && !n.IP.IsLoopback() {
			routes = append(routes, n.IP.String()+"/32")
		}
	}
	var out []string
	for _, text := range routes {
		route := netip.MustParsePrefix(text)
		covered := false
		for _, p := range opened {
			covered = covered || p.Bits() <= route.Bits() && p.Contains(route.Addr())
		}
		if !covered {
			out = append(out, text)
		}
	}
	// An open range inside a closed one is the longer prefix, which wins.
	for _, p := range opened {
		out = append(out, "via "+p.String())
	}
	return out, nil
}

// startNetwork starts slirp4netns for the namespaces of pid. It ends when the
// other end of alive is closed, that is with the sandbox.
func startNetwork(spec Spec, pid int, alive *os.File) error {
	ready, theirs, err := os.Pipe()
	if err != nil {
		return fmt.Errorf("make a pipe: %w", err)
	}
	log, err := os.OpenFile(filepath.Join(spec.Dir, "network.log"), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return errors.Join(fmt.Errorf("make the network's log: %w", err), ready.Close(), theirs.Close())
	}
	cmd := exec.Command("slirp4netns", "--configure", "--mtu=65520", "--disable-host-loopback", "--enable-sandbox", "--enable-seccomp",
		"--ready-fd=3", "--exit-fd=4", fmt.Sprintf("--userns-path=/proc/%d/ns/user", pid), "--netns-type=path", fmt.Sprintf("/proc/%d/ns/net", pid), tap)
	cmd.Stderr = log
	cmd.ExtraFiles = []*os.File{theirs, alive}
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	err = cmd.Start()
	err = errors.Join(err, theirs.Close(), log.Close())
	if err != nil {
		return errors.Join(fmt.Errorf("start slirp4netns (package slirp4netns): %w", err), ready.Close())
	}
	go func() {
		if cmd.Wait() != nil {
			return // it says why in its log
		}
	}()
	err = ready.SetReadDeadline(time.Now().Add(networkWithin))
	if err == nil {
		_, err = ready.Read(make([]byte, 1))
	}
	if err = errors.Join(err, ready.Close()); err != nil {
		said, readErr := os.ReadFile(log.Name())
		return errors.Join(fmt.Errorf("slirp4netns did not get ready: %w: %s", err, strings.TrimSpace(string(said))), readErr, cmd.Process.Kill())
	}
	if !spec.Weak.Cgroups {
		h, err := cgroups()
		if err != nil {
			return err
		}
		return h.make(spec.ID, spec.Limits, cmd.Process.Pid)
	}
	return nil
}

// configureNetwork brings loopback up and closes ranges off; it runs inside,
// as root there. The programs of the sandbox cannot change it.
func configureNetwork(config initConfig) error {
	if err := up("lo"); err != nil {
		return err
	}
	if !config.Network {
		return nil
	}
	link, err := net.InterfaceByName(tap)
	if err != nil {
		return fmt.Errorf("find the way out: %w", err)
	}
	for _, text := range config.Blocked {
		via, open := strings.CutPrefix(text, "via ")
		p, err := netip.ParsePrefix(via)
		if err != nil {
			return fmt.Errorf("route %q: %w", text, err)
		}
		m := routeMessage(p, unix.RTN_UNREACHABLE, 0)
		if open {
			m = routeMessage(p, unix.RTN_UNICAST, link.Index)
		}
		if err := netlink(m); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("route %q: %w", text, err)
		}
	}
	return nil
}

func up(name string) (err error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("bring %s up: %w", name, err)
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	request, err := unix.NewIfreq(name)
	if err != nil {
		return fmt.Errorf("bring %s up: %w", name, err)
	}
	request.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, request); err != nil {
		return fmt.Errorf("bring %s up: %w", name, err)
	}
	return nil
}

// gateway of the inside network.
var gateway = [4]byte{10, 0, 2, 2}

// routeMessage asks rtnetlink for a route: unreachable, or through the gateway
// (rtnetlink(7)).
func routeMessage(to netip.Prefix, kind byte, link int) []byte {
	attribute := func(b []byte, typ uint16, value []byte) []byte {
		b = binary.NativeEndian.AppendUint16(b, uint16(4+len(value)))
		b = binary.NativeEndian.AppendUint16(b, typ)
		return append(b, value...)
	}
	scope := byte(unix.RT_SCOPE_UNIVERSE)
	body := []byte{unix.AF_INET, byte(to.Bits()), 0, 0, unix.RT_TABLE_MAIN, unix.RTPROT_STATIC, scope, kind, 0, 0, 0, 0}
	addr := to.Addr().As4()
	body = attribute(body, unix.RTA_DST, addr[:])
	if link != 0 {
		body = attribute(body, unix.RTA_GATEWAY, gateway[:])
		body = attribute(body, unix.RTA_OIF, binary.NativeEndian.AppendUint32(nil, uint32(link)))
	}
	m := binary.NativeEndian.AppendUint32(nil, uint32(unix.NLMSG_HDRLEN+len(body)))
	m = binary.NativeEndian.AppendUint16(m, unix.RTM_NEWROUTE)
	m = binary.NativeEndian.AppendUint16(m, unix.NLM_F_REQUEST|unix.NLM_F_ACK|unix.NLM_F_CREATE|unix.NLM_F_EXCL)
	m = binary.NativeEndian.AppendUint32(m, 1)
	m = binary.NativeEndian.AppendUint32(m, 0)
	return append(m, body...)
}

// netlink sends a request and returns the kernel's answer to it.
func netlink(message []byte) (err error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, unix.Close(fd)) }()
	if err := unix.Sendto(fd, message, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return err
	}
	reply := make([]byte, 4096)
	n, _, err := unix.Recvfrom(fd, reply, 0)
	if err != nil {
		return err
	}
	if n < unix.NLMSG_HDRLEN+4 || binary.NativeEndian.Uint16(reply[4:]) != unix.NLMSG_ERROR {
		return errors.New("the kernel gave an odd answer")
	}
	if code := int32(binary.NativeEndian.Uint32(reply[unix.NLMSG_HDRLEN:])); code != 0 {
		return syscall.Errno(-code)
	}
	return nil
}
