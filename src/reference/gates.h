#pragma once
#include "reference/view.h"

// Decay and write gates. Small tensors, any dtype: computed in double, rounded once when stored.
namespace gdn::reference {

double softplus(double x); // log(1 + e^x) without losing small x; x itself for x > 20
double sigmoid(double x);

// GDN, per value head: g = -exp(A_log) softplus(alpha + dt_bias), beta = sigmoid(b), doubled if
// negative eigenvalues are allowed. alpha, b, g, beta [tokens, heads]; A_log, dt_bias [1, heads].
struct GatesBackward {
  ConstValues alpha, b, a_log, dt_bias;
  ConstValues dg, dbeta;
  ValuesGrad dalpha, db;   // [tokens, heads]
  Values da_log, ddt_bias; // [1, heads], accumulate
};
void gates_forward(ConstValues alpha, ConstValues b, ConstValues a_log, ConstValues dt_bias,
                   bool double_beta, Values g, Values beta);
void gates_backward(const GatesBackward& p, bool double_beta);

// GDN2, per key channel: g = -exp(A_log[head]) softplus(f + dt_bias), f, g [tokens, heads * dk],
// A_log [1, heads], dt_bias [1, heads * dk]. The erase and write gates are plain sigmoids.
void decay_forward(int64 key_dim, ConstValues f, ConstValues a_log, ConstValues dt_bias, Values g);
void decay_backward(int64 key_dim, ConstValues f, ConstValues a_log, ConstValues dt_bias,
                    ConstValues dg, ValuesGrad df, Values da_log, Values ddt_bias);
void sigmoid_forward(ConstValues x, Values y);
void sigmoid_backward(ConstValues x, ConstValues dy, ValuesGrad dx);

} // namespace gdn::reference
