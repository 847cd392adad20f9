package guest

import (
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ioctl hands data, which may be nil, to a device.
func ioctl(f *os.File, request uint, data []byte) error {
	_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), uintptr(request), uintptr(unsafe.Pointer(unsafe.SliceData(data))))
	runtime.KeepAlive(data)
	if errno != 0 {
		return errno
	}
	return nil
}
