#pragma once
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include "trainer/parameters.h"

// Gradients of the parts that a rank holds against those of a run on one rank.
namespace gdn::trainer::ranks_test {

using Gradients = std::vector<std::pair<std::string, std::vector<float>>>; // whole, or this rank's parts

// Together, as Parameters::gradient is.
inline Gradients gradients_of(Parameters& parameters) {
  Gradients all;
  for (const ParameterSlot& s : parameters.slots()) all.push_back({s.name(), parameters.gradient(s.name())});
  return all;
}

inline double norm_of(const std::vector<float>& v) {
  double sum = 0;
  for (float x : v) sum += static_cast<double>(x) * static_cast<double>(x);
  return std::sqrt(sum);
}

// The part of a whole parameter that a rank holds.
inline std::vector<float> part_of(const std::vector<float>& whole, const std::vector<HeldStretch>& held) {
  std::vector<float> out;
  for (const HeldStretch& h : held) out.insert(out.end(), whole.begin() + h.global, whole.begin() + h.global + h.count);
  return out;
}

// How far `mine`, elements [first, ...) of what is held of `whole`, is from those, over their norm; infinite if there are fewer. A part whose gradient is nothing
// but rounding has no norm of its own: the whole's counts `of_whole` times, and the model's `of_model` times.
inline double distance(const std::vector<float>& mine, const std::vector<float>& whole, const std::vector<HeldStretch>& held, double model_norm,
                       double of_whole, double of_model, std::size_t first = 0) {
  const std::vector<float> part = part_of(whole, held);
  if (part.size() < first + mine.size()) return HUGE_VAL;
  const std::vector<float> same(part.begin() + static_cast<std::ptrdiff_t>(first), part.begin() + static_cast<std::ptrdiff_t>(first + mine.size()));
  std::vector<float> difference = mine;
  for (std::size_t k = 0; k < same.size(); ++k) difference[k] -= same[k];
  return norm_of(difference) / (norm_of(same) + of_whole * norm_of(whole) + of_model * model_norm);
}

} // namespace gdn::trainer::ranks_test
