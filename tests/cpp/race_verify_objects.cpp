// VerifyJob over objects, with four workers: what it names, to the byte what it asks for, and how
// much of the answers it holds at one time. Damage, changes, requests that fail.
#include <condition_variable>
#include <mutex>
#include <set>

#include "check.h"
#include "engine/verify_job.h"
#include "io/file.h"
#include "memory_store.h"
#include "scratch_dir.h"
#include "verify_samples.h"

namespace {

using namespace dcpx::engine;
using dcpx::kBlockBytes;
using dcpx::io::kObjectEndBytes;

constexpr unsigned kWorkers = 4;
constexpr std::uint64_t kSlotBytes = 256 << 10;
constexpr std::size_t kKeptEnds = 32;  // objects whose ends a job keeps
const std::string kFolder = "s3://bucket/run";

struct Stored {
  std::string name;
  std::uint64_t size_bytes = 0;
  dcpx::Tail tail;
  std::size_t number = 0;  // in the order in which a job has added it
};

// The requests of sum() for an object: its checksums, where its end was not kept, and then cells.
void append_expected(const Stored& file, std::vector<Request>& requests) {
  const bool is_kept = file.number < kKeptEnds;
  const std::uint64_t kept =
      is_kept ? file.size_bytes - std::min(file.size_bytes, kObjectEndBytes) : file.size_bytes;
  const std::uint64_t checks_end = file.tail.page_checks_offset() + 4 * file.tail.page_count();
  if (file.tail.table_offset < kept)
    requests.push_back({file.name, file.tail.table_offset, checks_end - file.tail.table_offset});
  for (std::uint64_t at = 0; at < file.tail.data_bytes; at += kSlotBytes) {
    const std::uint64_t end = std::min(at + kSlotBytes, file.tail.data_bytes);
    if (at < kept) requests.push_back({file.name, at, end - at});
  }
}

struct Checked {
  explicit Checked(std::uint64_t salt) : random(salt) {}

  // Puts an object and adds it to the job. Returns it; nothing may be wrong with it.
  const Stored& add(const std::string& name, std::uint64_t nbytes, const std::string& fqn = "w") {
    const std::vector<std::byte> bytes = file_with_footer(random, fqn, nbytes);
    store->put(name, bytes);
    std::vector<Finding> findings;
    std::uint64_t file_bytes = 0;
    const FooterFacts facts = job.add_file(name, &file_bytes, findings);
    CHECK(facts.has_tail && facts.has_rows && findings.empty());
    CHECK_EQ(file_bytes, bytes.size());
    CHECK_EQ(store->take_looks(), 1U);
    files.push_back({name, bytes.size(), facts.tail, files.size()});
    return files.back();
  }

  std::vector<Request> expected() const {
    std::vector<Request> requests;
    for (const Stored& file : files) append_expected(file, requests);
    std::sort(requests.begin(), requests.end());
    return requests;
  }

  RandomSource random;
  std::shared_ptr<MemoryStore> store = std::make_shared<MemoryStore>();
  VerifyJob job{store, kFolder, {kWorkers, kSlotBytes, true}};
  std::vector<Stored> files;
};

TEST(damaged_blocks_of_many_objects_are_named_by_no_other_requests_than_foreseen) {
  for (std::uint64_t round = 0; round < 4; ++round) {
    const ThreadCheck threads_end;
    {
      Checked run(900 + round);
      std::set<std::pair<std::string, std::uint64_t>> bad, named;
      std::uint64_t total = 0;
      for (int f = 0; f < 40; ++f) {
        const std::uint64_t nbytes = run.random.pick<std::uint64_t>(
            {1, 65536, 200'000, kSlotBytes, 1'000'000, 1 + run.random.below(2'000'000)});
        const Stored& file = run.add("f" + std::to_string(f), nbytes);
        CHECK(run.store->take_reads().empty());
        total += nbytes;
        std::set<std::uint64_t> flipped;
        for (std::uint64_t i = run.random.below(4); i > 0; --i)
          flipped.insert(run.random.below(nbytes));
        // What was kept of an end is what was there.
        const bool is_kept = file.number < kKeptEnds;
        for (const std::uint64_t at : flipped) {
          const std::uint64_t cell = at / kSlotBytes * kSlotBytes;
          if (is_kept && cell + kObjectEndBytes >= file.size_bytes) continue;
          run.store->flip_byte(file.name, at);
          bad.insert({file.name, at / kBlockBytes});
        }
      }
      for (const Finding& finding : run.job.sum({})) {
        CHECK(finding.kind == FindingKind::kData);
        CHECK_EQ(finding.error.path.substr(0, kFolder.size()), kFolder);
        const auto begin = static_cast<std::uint64_t>(finding.error.offset);
        const auto end = begin + static_cast<std::uint64_t>(finding.error.nbytes);
        for (std::uint64_t at = begin; at < end; at += kBlockBytes)
          named.insert({finding.error.path.substr(kFolder.size() + 1), at / kBlockBytes});
      }
      CHECK(named == bad);
      CHECK_EQ(run.job.done_bytes(), total);
      CHECK_EQ(run.job.direct_bytes(), 0U);
      CHECK(run.store->take_reads() == run.expected());
      CHECK_EQ(run.store->take_looks(), 0U);
      CHECK(run.store->peak_bytes() <= kWorkers * kSlotBytes);
    }
    CHECK(threads_end.holds());
  }
}

TEST(damaged_table_of_an_object_is_named_and_other_pages_still_serve) {
  RandomSource random(920);
  const auto store = std::make_shared<MemoryStore>();
  store->put("f", file_with_footer(random, "w", 1025 * kBlockBytes));  // two pages
  VerifyJob job(store, kFolder, {kWorkers, 1 << 20, false});
  std::vector<Finding> findings;
  std::uint64_t file_bytes = 0;
  const dcpx::Tail tail = job.add_file("f", &file_bytes, findings).tail;
  store->flip_byte("f", tail.table_offset + 8);
  VerifyJob late(store, kFolder, {kWorkers, 1 << 20, false});
  late.add_file("f", &file_bytes, findings);
  CHECK(job.sum({}).empty());  // it has kept the table as it was
  findings = late.sum({});
  CHECK_EQ(late.done_bytes(), kBlockBytes);
  CHECK_EQ(findings.size(), 1U);
  CHECK(findings[0].kind == FindingKind::kTable);
}

TEST(object_that_is_replaced_or_gone_is_one_finding_and_asked_for_no_more) {
  Checked run(930);
  for (const char* name : {"a", "b", "c"}) run.add(name, 6'000'000);
  run.store->remove("a");
  run.store->put("b", file_with_footer(run.random, "w", 6'000'000));
  const std::vector<Finding> findings = run.job.sum({});
  CHECK_EQ(findings.size(), 2U);
  for (const Finding& finding : findings) CHECK(finding.kind == FindingKind::kUnreadable);
  CHECK_EQ(findings[0].error.sys_errno, ENOENT);
  CHECK(std::string(findings[1].error.what()).find("was replaced while it was checked") !=
        std::string::npos);
  CHECK_EQ(findings[1].error.path, kFolder + "/b");
  std::map<std::string, std::uint64_t> requests;
  for (const Request& request : run.store->take_reads()) ++requests[request.name];
  CHECK(requests["a"] <= kWorkers && requests["b"] <= kWorkers);
  std::vector<Request> of_c;
  append_expected(run.files[2], of_c);
  CHECK_EQ(requests["c"], of_c.size());
  CHECK_EQ(run.job.done_bytes(), 6'000'000U);
}

// A store whose reads fail, all at the same moment, once so many are under way.
class FailingTogether : public MemoryStore {
 public:
  explicit FailingTogether(int count) : left_(count) {}

  Bytes read(const std::string& name, const std::string&, std::uint64_t, std::uint64_t) override {
    std::unique_lock lock(mutex_);
    if (--left_ == 0) all_.notify_all();
    all_.wait(lock, [&] { return left_ <= 0; });
    throw dcpx::storage_error("get", name, ESTALE);
  }

 private:
  std::mutex mutex_;
  std::condition_variable all_;
  int left_ = 0;
};

TEST(requests_of_one_object_that_fail_together_are_one_finding) {
  RandomSource random(935);
  const auto store = std::make_shared<FailingTogether>(int{kWorkers});
  store->put("f", file_with_footer(random, "w", 8 * kSlotBytes));
  VerifyJob job(store, kFolder, {kWorkers, kSlotBytes, false});
  std::vector<Finding> findings;
  std::uint64_t file_bytes = 0;
  job.add_file("f", &file_bytes, findings);
  CHECK_EQ(job.sum({}).size(), 1U);
}

TEST(request_that_fails_is_one_finding_of_its_object_and_others_are_summed) {
  for (std::uint64_t n = 0;; ++n) {
    Checked run(940);
    for (const char* name : {"a", "b"}) run.add(name, 1'500'000);
    const std::uint64_t requests = run.expected().size();
    run.store->fail_after(n);
    const std::vector<Finding> findings = run.job.sum({});
    if (n == requests) {
      CHECK(findings.empty());
      break;
    }
    CHECK_EQ(findings.size(), 1U);
    CHECK(findings[0].kind == FindingKind::kUnreadable);
    CHECK_EQ(findings[0].error.sys_errno, EIO);
    CHECK(run.job.done_bytes() >= 1'500'000 && run.job.done_bytes() < 3'000'000);
  }
}

}  // namespace
