#pragma once
#include "kernels/common/matrix.h"

// Routing: scores, the choice of experts, their weights, and the auxiliary losses. T tokens, E experts (at
// most 1024), k chosen. Scores are a softmax; logits and scores may be bf16 or fp32.
namespace gdn::kernels {

struct Route {
  int top_k = 0;
  bool renormalise = true; // weights are a softmax over the chosen logits; else the chosen of a softmax over all
  bool balanced = false;   // forced: slot t k + j goes to expert (t k + j) % E
};

// The chosen experts of every token, best first, equal logits by lowest index. Any output may be absent.
struct RouteForwardParams {
  Route route;
  Matrix logits = {};              // [T, E]
  Matrix weights = {};             // [T, k]
  Matrix experts[2];               // [T, k], twice
  Matrix scores[2];                // [T, E], softmax over all, twice
  Matrix probs = {}, map = {};     // [T, E]: weights of the chosen, 0 elsewhere; whether chosen (Bool)
};
void route_forward(const RouteForwardParams& params, const LaunchContext& context);

// dlogits (+)= through the weights, the balance loss and the z-loss, each if present. The softmax over all
// experts is read from `scores`, or made from the logits.
struct RouteBackwardParams {
  Route route;
  Matrix logits, scores;
  Matrix weights;                  // [T, k], of the chosen: read where they are renormalised
  Matrix experts;                  // [T, k]
  Matrix d_weights;                // [T, k]; or
  Matrix d_probs;                  // [T, E]
  const std::int32_t* counts = nullptr; // [E], slots of each expert: balance loss
  float balance = 0;               // dl_e += balance p_e (count_e - sum p_i count_i)
  float z = 0;                     // dl_e += z lse p_e
  Gradient d_logits;
};
void route_backward(const RouteBackwardParams& params, const LaunchContext& context);

// Per token: balance sum_e count_e p_e + z lse^2, [T, 1] fp32.
void route_losses(const Matrix& logits, const std::int32_t* counts, float balance, float z, const Matrix& losses,
                  const LaunchContext& context);

inline constexpr int kMaxRouted = 1024; // experts
inline constexpr int kMaxTopK = 32;

} // namespace gdn::kernels
