#include "guarded.h"

#include <stdexcept>

#include "tailrace_cpu.h"

namespace tailrace {

thread_local std::string last_error;

const Kernels& kernels_named(const char* name) {
  const Kernels* kernels = find_kernels(name);
  if (!kernels) throw std::invalid_argument(std::string("this CPU or this build has no kernels ") + name);
  return *kernels;
}

}  // namespace tailrace

const char* tailrace_last_error(void) { return tailrace::last_error.c_str(); }
