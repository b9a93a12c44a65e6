/* Preloaded into User Mode Linux 6.1 on processors with AMX (tests/filesystems/guests.py).
 *
 * It sets its children's floating-point registers with PTRACE_SETREGSET and a buffer of 2696 bytes. Where the whole
 * register state is longer, the kernel wants all of it and says EFAULT, and the guest panics. Here the call is made
 * with the child's own state, of which the first bytes are replaced by the guest's.
 */
#define _GNU_SOURCE
#include <elf.h>
#include <errno.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char whole[1 << 16] __attribute__((aligned(64)));

long ptrace(enum __ptrace_request request, ...)
{
    va_list arguments;
    va_start(arguments, request);
    pid_t pid = va_arg(arguments, pid_t);
    void *address = va_arg(arguments, void *);
    void *data = va_arg(arguments, void *);
    va_end(arguments);

    if (request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA || request == PTRACE_PEEKUSER) {
        long word;
        if (syscall(SYS_ptrace, request, pid, address, &word) < 0)
            return -1;
        errno = 0;
        return word;
    }
    if (request == PTRACE_SETREGSET && (long)address == NT_X86_XSTATE) {
        struct iovec *given = data;
        struct iovec all = {whole, sizeof whole};
        if (syscall(SYS_ptrace, PTRACE_GETREGSET, pid, address, &all) < 0)
            return -1;
        memcpy(whole, given->iov_base, given->iov_len < all.iov_len ? given->iov_len : all.iov_len);
        return syscall(SYS_ptrace, request, pid, address, &all);
    }
    return syscall(SYS_ptrace, request, pid, address, data);
}
