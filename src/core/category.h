#pragma once
#include <array>
#include <string_view>

#include "core/units.h"

namespace gdn {

// What a live byte is for; the same names in every output of both programs.
//  Activations: generation 0 of a tensor that crosses from its micro-batch's forward to its backward.
//  Transient:   replay generations, gradients of activations ("d:" buffers) and forward-only tensors.
//  Workspace:   scratch of one running op.
//  Context, Allocator: outside the ledger (CUDA context and libraries; caching-allocator reserve).
enum class Category {
  Parameters, Gradients, Optimizer, Activations, Transient, Logits, Workspace, Communication,
  Context, Allocator
};
inline constexpr int kCategoryCount = 10;

std::string_view name_of(Category category); // "parameters", ...

// Bytes by category; a tiny value type used for levels, peaks and differences.
struct CategoryBytes {
  std::array<Bytes, kCategoryCount> by{};

  Bytes& operator[](Category c) { return by[static_cast<size_t>(c)]; }
  Bytes operator[](Category c) const { return by[static_cast<size_t>(c)]; }
  Bytes total() const {
    Bytes sum = 0;
    for (Bytes b : by) sum += b;
    return sum;
  }
  CategoryBytes& operator+=(const CategoryBytes& o) {
    for (size_t i = 0; i < by.size(); ++i) by[i] += o.by[i];
    return *this;
  }
  CategoryBytes& operator-=(const CategoryBytes& o) {
    for (size_t i = 0; i < by.size(); ++i) by[i] -= o.by[i];
    return *this;
  }
  friend CategoryBytes operator+(CategoryBytes a, const CategoryBytes& b) { return a += b; }
  friend CategoryBytes operator-(CategoryBytes a, const CategoryBytes& b) { return a -= b; }
  friend CategoryBytes operator*(CategoryBytes a, Bytes n) {
    for (Bytes& b : a.by) b *= n;
    return a;
  }
  friend bool operator==(const CategoryBytes&, const CategoryBytes&) = default;
};

} // namespace gdn
