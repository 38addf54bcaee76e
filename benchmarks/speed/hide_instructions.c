/* A library to preload into a process, so that CPUID hides instruction sets from it: see processor.py.
 *
 * The kernel lets CPUID fault; the handler of the fault runs it and clears bits of leaf 7. The variable HIDDEN_SETS has
 * six hexadecimal numbers: the bits to clear of EBX, ECX and EDX of subleaf 0 and of EAX, ECX and EDX of subleaf 1. The
 * instructions themselves stay: only programs that ask before they use them (all that run on any x86-64) do without. */
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <cpuid.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

static unsigned hidden[6];

static void answer(int number, siginfo_t *info, void *context) {
  greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
  const unsigned char *instruction = (const unsigned char *)registers[REG_RIP];
  (void)info;
  if (instruction[0] != 0x0f || instruction[1] != 0xa2) {
    signal(number, SIG_DFL); /* another fault: it happens again, and ends the process */
    return;
  }
  const unsigned leaf = (unsigned)registers[REG_RAX], subleaf = (unsigned)registers[REG_RCX];
  unsigned a, b, c, d;
  syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1);
  __cpuid_count(leaf, subleaf, a, b, c, d);
  syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0);
  if (leaf == 7 && subleaf == 0) b &= ~hidden[0], c &= ~hidden[1], d &= ~hidden[2];
  if (leaf == 7 && subleaf == 1) a &= ~hidden[3], c &= ~hidden[4], d &= ~hidden[5];
  registers[REG_RAX] = a, registers[REG_RBX] = b, registers[REG_RCX] = c, registers[REG_RDX] = d;
  registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void hide(void) {
  const char *sets = getenv("HIDDEN_SETS");
  if (!sets || sscanf(sets, "%x %x %x %x %x %x", hidden, hidden + 1, hidden + 2, hidden + 3, hidden + 4, hidden + 5) != 6)
    return;
  struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
  sigaction(SIGSEGV, &action, NULL);
  if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0) != 0) {
    fprintf(stderr, "hide_instructions: this processor, or its hypervisor, cannot let CPUID fault\n");
    _exit(1);
  }
}
