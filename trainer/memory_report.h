#pragma once
#include "config/profile.h"
#include "report/document.h"
#include "trainer/ledger.h"
#include "trainer/prediction.h"

namespace gdn::trainer {

// What a step needs, by category at its peak, against what may be used.
void add_prediction(report::Document& document, const Prediction& prediction, Bytes budget);

// Predicted against measured, category by category at each one's peak.
void add_comparison(report::Document& document, const Prediction& prediction, const Ledger::Peak& measured, Bytes arena);

// memory.allocated_bytes, memory.arena_bytes, categories.*: the keys of gdnplan's profiles.
void add_memory_rows(config::ProfileSet& set, const CategoryBytes& at_peak, Bytes arena);

} // namespace gdn::trainer
