// The edge of the C interface: what is thrown behind it becomes a message.
#pragma once
#include <exception>
#include <new>
#include <string>

#include "formats.h"

namespace tailrace {

extern thread_local std::string last_error;

// 0, or -1 and a message.
template <class Work>
int guarded(Work&& work) {
  try {
    work();
    return 0;
  } catch (const std::bad_alloc&) {
    last_error = "out of memory";
  } catch (const std::exception& error) {
    last_error = error.what();
  }
  return -1;
}

// Throws std::invalid_argument where this build or this CPU lacks them.
const Kernels& kernels_named(const char* name);

}  // namespace tailrace
