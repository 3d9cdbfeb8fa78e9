// Large memory that is handed out once and never given back piece by piece.
#pragma once
#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <new>

namespace tailrace {

// One mapping of zeros in huge pages where the system has them; it takes memory only as it is touched.
class Mapping {
 public:
  Mapping() = default;
  explicit Mapping(size_t bytes) : bytes_(bytes) {
    void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) throw std::bad_alloc();
    data_ = (uint8_t*)at;
#if defined(MADV_HUGEPAGE)
    madvise(data_, bytes, MADV_HUGEPAGE);
#endif
  }
  ~Mapping() {
    if (data_) munmap(data_, bytes_);
  }
  Mapping(Mapping&& other) noexcept : data_(other.data_), bytes_(other.bytes_) { other.data_ = nullptr; }
  Mapping& operator=(Mapping&& other) noexcept {
    uint8_t* data = data_;
    const size_t bytes = bytes_;
    data_ = other.data_, bytes_ = other.bytes_;
    other.data_ = data, other.bytes_ = bytes;
    return *this;
  }

  uint8_t* data() const { return data_; }
  size_t bytes() const { return bytes_; }

 private:
  uint8_t* data_ = nullptr;
  size_t bytes_ = 0;
};

// Gives out parts of a mapping; without one it only counts what they would take.
class Cursor {
 public:
  explicit Cursor(uint8_t* data) : data_(data) {}

  template <class T>
  T* take(size_t count) {
    T* part = data_ ? (T*)(data_ + used_) : nullptr;
    used_ += (count * sizeof(T) + 63) / 64 * 64;
    return part;
  }
  size_t used() const { return used_; }

 private:
  uint8_t* data_;
  size_t used_ = 0;
};

}  // namespace tailrace
