#pragma once
#include <vector>

#include "program/forest.h"

namespace gdn::program {

// What the passes of a unit run, before anything is run: which tensors carry a gradient, which backward steps run, what
// they keep, and which ops every span's replay runs.
class Passes {
public:
  // `list` and `spans` must outlive it. input_gradient: d:input is wanted. Without `backward` nothing but forward runs.
  Passes(const model::OpList& list, const std::vector<Span>& spans, bool input_gradient, bool backward);

  int maker(model::TensorId t) const { return makers_[static_cast<size_t>(t)]; } // op index; -1: an input
  // The tensor whose gradient storage holds d:t.
  size_t root(model::TensorId t) const;
  // Those between a trainable parameter (or a wanted input gradient) and the end of the list carry a gradient.
  bool required(model::TensorId t) const { return required_[static_cast<size_t>(t)]; }
  // d:t is written over t itself.
  bool overwritten(model::TensorId t) const { return list_.tensor(t).gradient == model::GradientStorage::Overwrite; }
  // Somebody needs what the step writes, and a gradient reaches it.
  bool runs(int op, size_t step) const { return runs_[static_cast<size_t>(op)][step] != 0; }
  bool runs(int op) const; // any of its steps

  bool replays(const Span& s) const { return replay(s).runs; }
  // Per op, whether a replay of the span runs it; empty: all.
  const std::vector<char>& needed(const Span& s) const { return replay(s).needed; }

private:
  struct Replay {
    bool runs = false;
    std::vector<char> needed;
  };

  const Replay& replay(const Span& s) const { return replays_[static_cast<size_t>(&s - spans_.data())]; }
  const model::Op& op(int index) const { return list_.ops[static_cast<size_t>(index)]; }

  void mark_required(bool input_gradient);
  void mark_running();
  bool wanted(const model::Op& o, const model::Step& s) const;
  template <class Use> void for_each_saved(int index, Use use) const;
  bool saved_outside(const Span& s, model::TensorId t) const;
  void plan_replays();
  bool is_replayed(const Span& s) const;
  bool wanted_outside(const Span& s, model::TensorId t) const;
  bool replay_reads(const Span& s, model::StorageId storage) const;
  std::vector<char> needed_ops(const Span& s) const;

  const model::OpList& list_;
  const std::vector<Span>& spans_;
  std::vector<int> makers_;
  std::vector<bool> required_;
  std::vector<std::vector<char>> runs_; // per op and step
  std::vector<bool> aliases_;           // per op: a gradient passes through it under another name
  std::vector<Replay> replays_;         // per span
};

} // namespace gdn::program
