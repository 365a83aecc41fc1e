#pragma once
#include <cmath>
#include <functional>
#include <vector>

#include <doctest/doctest.h>

#include "core/error.h"
#include "fixture.h"

// Recompute changes no bit: every setting against the step without recompute.
namespace gdn::trainer::fixture {

// Runs each of `settings`: loss, load counters and all gradients are those without recompute, bit by bit;
// the ledger equals the prediction at every event (the executor throws otherwise) and at the peak. Only a
// hypothetical setting may be impossible (spans that overlap, or drop what another one still has to
// read); it must then be refused before anything runs. Returns how many ran.
inline size_t check_identical(Session& s, const std::vector<plan::Setting>& settings,
                              const std::function<bool(const plan::Setting&)>& hypothetical = [](const auto&) { return false; }) {
  const auto data = batches(s.model(), s.run_settings());
  s.parameters().initialise(3);
  s.use({});
  const Outcome base = outcome(s, data);
  REQUIRE(std::isfinite(base.result.loss));
  size_t ran = 0;
  for (const plan::Setting& setting : settings) {
    CAPTURE(setting.text());
    try {
      s.use(setting);
    } catch (const Error& e) {
      CAPTURE(std::string(e.what()));
      CHECK(hypothetical(setting));
      CHECK((e.code() == ErrorCode::Config || e.code() == ErrorCode::Usage));
      continue;
    }
    ++ran;
    const Outcome o = outcome(s, data);
    CHECK(o.result.loss == base.result.loss);
    CHECK(o.result.expert_load == base.result.expert_load); // a replay counts nothing twice
    CHECK(o.result.aux_loss == base.result.aux_loss);
    CHECK(o.result.peak.bytes == predicted_peak(s.program()).bytes + s.parameters().bytes().total());
    bool equal = true;
    for (size_t i = 0; i < base.gradients.size(); ++i)
      if (o.gradients[i] != base.gradients[i]) {
        equal = false;
        MESSAGE("differs: ", s.parameters().slots()[i].name());
      }
    CHECK(equal);
  }
  return ran;
}

// A form that no revision offers, or a span of the user's.
inline bool is_hypothetical(const plan::Setting& s) {
  for (const std::string& m : s.modules)
    if (m.find(":discard") != std::string::npos) return true;
  return !s.user_spans.empty();
}

} // namespace gdn::trainer::fixture
