// Definitions of two names that the C++ compiler of a newer system takes from its own libraries, so that the library
// loads with glibc 2.28 and libstdc++ of GCC 8: the systems of wheels tagged manylinux_2_28. The linker script keeps
// both names inside of the library.
#include <new>

// Part of glibc since 2.32. If it is true, libstdc++ counts the references of a shared_ptr without atomics.
extern "C" {
char __libc_single_threaded = 0;
}

// Part of libstdc++ since GCC 11.
namespace std {
[[noreturn]] void __throw_bad_array_new_length();
void __throw_bad_array_new_length() { throw bad_array_new_length(); }
}  // namespace std
