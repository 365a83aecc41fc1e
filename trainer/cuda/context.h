#pragma once
#include "trainer/cuda/collectives.h"

// What context parallelism asks of ops that are not exchanges.
namespace gdn::trainer::cuda {

// Core attention of this rank's queries over all keys and values, gathered; their gradient is summed and scattered.
void gathered_attention_forward(const OpCall& c, Engine& e);
void gathered_attention_backward(const OpCall& c, Engine& e);

// A parameter of which an op needs the rows of its rank's heads: the tensor holds those of all context-parallel ranks.
// `sections`: rows of this rank in each section, one section after the other. On one context rank the parameter itself.
class HeadSlice {
public:
  HeadSlice(const OpCall& call, Engine& engine, size_t parameter, std::vector<std::int64_t> sections, std::int64_t cols, LaunchContext& memory);

  View value() const { return value_; }
  // The fp32 gradient, to be added to; absent when nothing trains the parameter. Ask in the steps that write it.
  View gradient();
  void finish(); // adds what gradient() collected to the parameter's

private:
  View part_of(const View& whole, size_t section) const;
  View section_of(const View& mine, size_t section) const;

  const OpCall& call_;
  Engine& engine_;
  size_t parameter_;
  std::vector<std::int64_t> sections_;
  std::int64_t rows_ = 0, cols_, ranks_;
  LaunchContext& memory_;
  View value_, whole_gradient_, gradient_;
};

// A slice with one column as the row that functions of vectors take.
inline View as_row(View v) { return v ? View{v.data, v.dtype, 1, v.rows * v.cols, v.rows * v.cols} : v; }

} // namespace gdn::trainer::cuda
