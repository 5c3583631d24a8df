#include "common/spans.h"

#include "common/worker_group.h"

namespace dcpx {

void SpanLog::add(SpanKind kind, std::uint64_t begin_ns, std::uint64_t end_ns,
                  std::uint64_t nbytes) noexcept {
  const std::uint32_t worker = current_worker();
  Sum& sum = sums_[worker % kWorkers].of_kind[static_cast<std::size_t>(kind)];
  sum.count.fetch_add(1, std::memory_order_relaxed);
  sum.busy_ns.fetch_add(end_ns - begin_ns, std::memory_order_relaxed);
  sum.nbytes.fetch_add(nbytes, std::memory_order_relaxed);
  if (end_ns - begin_ns < kListedNs) return;
  const bool is_late = kind == SpanKind::kEngine || kind == SpanKind::kSync;
  const Lock lock(mutex_);
  if (spans_.size() < kMaxSpans - (is_late ? 0 : kLateSpans))
    spans_.push_back({begin_ns, end_ns, nbytes, kind, worker});
}

std::uint64_t SpanLog::total_ns(SpanKind kind) const noexcept {
  std::uint64_t total = 0;
  for (const WorkerSums& sums : sums_) {
    total += sums.of_kind[static_cast<std::size_t>(kind)].busy_ns.load(std::memory_order_relaxed);
  }
  return total;
}

std::vector<Span> SpanLog::spans() const {
  const Lock lock(mutex_);
  return spans_;
}

std::vector<SpanSum> SpanLog::sums() const {
  std::vector<SpanSum> out;
  for (std::uint32_t worker = 0; worker < kWorkers; ++worker) {
    for (std::uint32_t kind = 0; kind < kSpanKinds.size(); ++kind) {
      const Sum& sum = sums_[worker].of_kind[kind];
      const std::uint64_t count = sum.count.load(std::memory_order_relaxed);
      if (count == 0) continue;
      out.push_back({count, sum.busy_ns.load(std::memory_order_relaxed),
                     sum.nbytes.load(std::memory_order_relaxed), static_cast<SpanKind>(kind),
                     worker});
    }
  }
  return out;
}

}  // namespace dcpx
