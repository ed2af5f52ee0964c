/* A preload for User Mode Linux on processors whose extended state is larger than it knows (AMX): the kernel refuses to
   set less than the whole of it. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <stdarg.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/uio.h>

long ptrace(enum __ptrace_request request, ...) {
  static long (*next)(enum __ptrace_request, pid_t, void *, void *);
  static char whole[1 << 16];
  va_list given;
  va_start(given, request);
  pid_t pid = va_arg(given, pid_t);
  void *address = va_arg(given, void *), *data = va_arg(given, void *);
  va_end(given);
  if (!next) next = dlsym(RTLD_NEXT, "ptrace");
  if ((request != PTRACE_GETREGSET && request != PTRACE_SETREGSET) || (long)address != NT_X86_XSTATE)
    return next(request, pid, address, data);
  struct iovec *asked = data, all = {whole, sizeof whole};
  if (next(PTRACE_GETREGSET, pid, address, &all) < 0) return -1;
  size_t size = asked->iov_len < all.iov_len ? asked->iov_len : all.iov_len;
  if (request == PTRACE_GETREGSET) {
    memcpy(asked->iov_base, whole, size);
    asked->iov_len = size;
    return 0;
  }
  memcpy(whole, asked->iov_base, size);
  return next(PTRACE_SETREGSET, pid, address, &all);
}
