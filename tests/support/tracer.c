// Preloaded into a program: writes what it looks up, connects to and creates into the file that TRACE names.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static void note(const char* kind, const char* what) {
  const char* path = getenv("TRACE");
  if (!path) return;
  char line[4096];
  const int size = snprintf(line, sizeof line, "%s %s\n", kind, what ? what : "");
  // By system calls, because the functions of the C library are traced themselves.
  const int file = syscall(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND, 0600);
  if (file < 0) return;
  syscall(SYS_write, file, line, size < (int)sizeof line ? size : (int)sizeof line);
  syscall(SYS_close, file);
}

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

static void note_address(const struct sockaddr* address) {
  char text[INET6_ADDRSTRLEN] = "";
  if (!address) return;
  if (address->sa_family == AF_INET)
    inet_ntop(AF_INET, &((const struct sockaddr_in*)address)->sin_addr, text, sizeof text);
  else if (address->sa_family == AF_INET6)
    inet_ntop(AF_INET6, &((const struct sockaddr_in6*)address)->sin6_addr, text, sizeof text);
  else
    return;
  note("connect", text);
}

int connect(int socket, const struct sockaddr* address, socklen_t size) {
  note_address(address);
  return NEXT(connect)(socket, address, size);
}

ssize_t sendto(int socket, const void* data, size_t size, int flags, const struct sockaddr* to, socklen_t length) {
  note_address(to);
  return NEXT(sendto)(socket, data, size, flags, to, length);
}

int getaddrinfo(const char* name, const char* service, const struct addrinfo* hints, struct addrinfo** result) {
  note("lookup", name);
  return NEXT(getaddrinfo)(name, service, hints, result);
}

struct hostent* gethostbyname(const char* name) {
  note("lookup", name);
  return NEXT(gethostbyname)(name);
}

#define OPEN(name)                                                    \
  int name(const char* path, int flags, ...) {                        \
    va_list rest;                                                     \
    va_start(rest, flags);                                            \
    const mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, int) : 0; \
    va_end(rest);                                                     \
    if (flags & O_CREAT) note("create", path);                        \
    return NEXT(name)(path, flags, mode);                             \
  }
OPEN(open)
OPEN(open64)

#define OPENAT(name)                                                  \
  int name(int folder, const char* path, int flags, ...) {            \
    va_list rest;                                                     \
    va_start(rest, flags);                                            \
    const mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, int) : 0; \
    va_end(rest);                                                     \
    if (flags & O_CREAT) note("create", path);                        \
    return NEXT(name)(folder, path, flags, mode);                     \
  }
OPENAT(openat)
OPENAT(openat64)

#define FOPEN(name)                                                   \
  FILE* name(const char* path, const char* mode) {                    \
    if (strpbrk(mode, "wa")) note("create", path);                    \
    return NEXT(name)(path, mode);                                    \
  }
FOPEN(fopen)
FOPEN(fopen64)

int mkdir(const char* path, mode_t mode) {
  note("create", path);
  return NEXT(mkdir)(path, mode);
}
