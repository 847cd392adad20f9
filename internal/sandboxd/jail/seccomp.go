package jail

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// refused are system calls that no program of a desktop needs and that reach
// parts of the kernel that are not namespaced or were often at fault. They
// answer EPERM.
var refused = []uint32{
	unix.SYS_ADD_KEY, unix.SYS_REQUEST_KEY, unix.SYS_KEYCTL, unix.SYS_BPF, unix.SYS_PERF_EVENT_OPEN, unix.SYS_USERFAULTFD,
	unix.SYS_KEXEC_LOAD, unix.SYS_KEXEC_FILE_LOAD, unix.SYS_INIT_MODULE, unix.SYS_FINIT_MODULE, unix.SYS_DELETE_MODULE,
	unix.SYS_OPEN_BY_HANDLE_AT, unix.SYS_ACCT, unix.SYS_QUOTACTL, unix.SYS_SWAPON, unix.SYS_SWAPOFF, unix.SYS_REBOOT,
	unix.SYS_SETTIMEOFDAY, unix.SYS_CLOCK_SETTIME, unix.SYS_SYSLOG, unix.SYS_LOOKUP_DCOOKIE, unix.SYS_IO_URING_SETUP,
	unix.SYS_IO_URING_ENTER, unix.SYS_IO_URING_REGISTER, unix.SYS_FANOTIFY_INIT, unix.SYS_NAME_TO_HANDLE_AT,
}

// x32 marks system calls of the x32 ABI, which are refused as a whole.
const x32 = 0x40000000

// filterSyscalls installs the filter on this thread, for all that it starts.
// Programs of another architecture, such as 32-bit ones, are ended.
func filterSyscalls() error {
	const archAMD64, archARM64 = 0xc000003e, 0xc00000b7
	arch := map[string]uint32{"amd64": archAMD64, "arm64": archARM64}[runtime.GOARCH]
	if arch == 0 {
		return fmt.Errorf("no system call filter for %s", runtime.GOARCH)
	}
	const deny = 0x00050000 | uint32(unix.EPERM) // SECCOMP_RET_ERRNO
	program := []bpf.Instruction{
		bpf.LoadAbsolute{Off: 4, Size: 4}, // seccomp_data.arch
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: arch, SkipTrue: 1},
		bpf.RetConstant{Val: 0x80000000},  // SECCOMP_RET_KILL_PROCESS
		bpf.LoadAbsolute{Off: 0, Size: 4}, // seccomp_data.nr
	}
	if runtime.GOARCH == "amd64" {
		program = append(program, bpf.JumpIf{Cond: bpf.JumpLessThan, Val: x32, SkipTrue: 1}, bpf.RetConstant{Val: deny})
	}
	for _, nr := range refused {
		program = append(program, bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: nr, SkipTrue: 1}, bpf.RetConstant{Val: deny})
	}
	program = append(program, bpf.RetConstant{Val: 0x7fff0000}) // SECCOMP_RET_ALLOW
	raw, err := bpf.Assemble(program)
	if err != nil {
		return fmt.Errorf("assemble the system call filter: %w", err)
	}
	filter := make([]unix.SockFilter, len(raw))
	for i, r := range raw {
		filter[i] = unix.SockFilter{Code: r.Op, Jt: r.Jt, Jf: r.Jf, K: r.K}
	}
	fprog := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	_, _, errno := unix.Syscall(unix.SYS_PRCTL, unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&fprog)))
	runtime.KeepAlive(filter)
	if errno != 0 {
		return fmt.Errorf("install the system call filter: %w", errno)
	}
	return nil
}
