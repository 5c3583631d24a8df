// VerifyJob with four workers: the blocks that it names are those that differ; a stopped or failed
// job leaves nothing running and nothing open.
#include <set>

#include "check.h"
#include "engine/verify_job.h"
#include "random_source.h"
#include "scratch_dir.h"
#include "verify_samples.h"

namespace {

using namespace dcpx::engine;
using dcpx::kBlockBytes;

void write_file(const ScratchDir& dir, const std::string& name,
                const std::vector<std::byte>& bytes) {
  std::ofstream file(dir.path() + "/" + name, std::ios::binary);
  file.write(reinterpret_cast<const char*>(bytes.data()),
             static_cast<std::streamsize>(bytes.size()));
}

void write_with_footer(RandomSource& random, const ScratchDir& dir, const std::string& name,
                       std::uint64_t nbytes) {
  write_file(dir, name, file_with_footer(random, name, nbytes));
}

std::uint64_t random_size(RandomSource& random) {
  return random.pick<std::uint64_t>(
      {1, 65536, 65537, 300'000, 1'000'000, 5'000'000, 1 + random.below(3'000'000)});
}

TEST(damaged_blocks_of_many_files_are_those_that_are_named) {
  for (int round = 0; round < 5; ++round) {
    RandomSource random(500 + static_cast<std::uint64_t>(round));
    const ThreadCheck threads_end;
    const std::size_t files_before = count_of_open_files();
    {
      const ScratchDir dir;
      VerifyJob job(dir.fd(), dir.path(), {4, 256 << 10, random.chance(2)});
      std::set<std::pair<std::string, std::uint64_t>> bad;
      std::uint64_t total = 0;
      for (int f = 0; f < 6; ++f) {
        const std::string name = "f" + std::to_string(f);
        const std::uint64_t nbytes = random_size(random);
        write_with_footer(random, dir, name, nbytes);
        std::vector<Finding> findings;
        std::uint64_t file_bytes = 0;
        const FooterFacts facts = job.add_file(name, &file_bytes, findings);
        CHECK(facts.has_tail && facts.has_rows && findings.empty());
        CHECK_EQ(facts.rows.size(), std::size_t{1});
        total += nbytes;
        std::set<std::uint64_t> flipped;  // a byte that is flipped twice is as it was
        for (std::uint64_t i = random.below(8); i > 0; --i) flipped.insert(random.below(nbytes));
        for (const std::uint64_t at : flipped) {
          dir.flip_byte(name, at);
          bad.insert({name, at / kBlockBytes});
        }
      }
      std::set<std::pair<std::string, std::uint64_t>> named;
      for (const Finding& finding : job.sum({})) {
        CHECK(finding.kind == FindingKind::kData);
        const auto begin = static_cast<std::uint64_t>(finding.error.offset);
        const auto end = begin + static_cast<std::uint64_t>(finding.error.nbytes);
        for (std::uint64_t at = begin; at < end; at += kBlockBytes)
          named.insert({finding.error.path.substr(dir.path().size() + 1), at / kBlockBytes});
      }
      CHECK(named == bad);
      CHECK_EQ(job.done_bytes(), total);
    }
    CHECK(threads_end.holds());
    CHECK_EQ(count_of_open_files(), files_before);
  }
}

TEST(damaged_block_table_is_named_and_other_pages_of_it_still_serve) {
  RandomSource random(510);
  const ScratchDir dir;
  write_with_footer(random, dir, "f", 1025 * kBlockBytes);  // two pages
  std::vector<Finding> findings;
  std::uint64_t file_bytes = 0;
  {
    VerifyJob job(dir.fd(), dir.path(), {4, 1 << 20, false});
    const dcpx::Tail tail = job.add_file("f", &file_bytes, findings).tail;
    dir.flip_byte("f", tail.table_offset + 8);   // the first page
    dir.flip_byte("f", 1024 * kBlockBytes + 5);  // a block of the second
    findings = job.sum({});
    CHECK_EQ(job.done_bytes(), kBlockBytes);
  }
  CHECK_EQ(findings.size(), std::size_t{2});
  CHECK(findings[0].kind == FindingKind::kData && findings[1].kind == FindingKind::kTable);
}

TEST(file_that_is_replaced_or_gone_between_look_and_sum_is_a_finding) {
  RandomSource random(520);
  const ScratchDir dir;
  VerifyJob job(dir.fd(), dir.path(), {4, 256 << 10, true});
  for (const char* name : {"a", "b", "c"}) {
    write_with_footer(random, dir, name, 2'000'000);
    std::vector<Finding> findings;
    std::uint64_t file_bytes = 0;
    job.add_file(name, &file_bytes, findings);
  }
  std::filesystem::remove(dir.path() + "/a");
  write_file(dir, "b", random.bytes(1000));
  const std::vector<Finding> findings = job.sum({});
  CHECK_EQ(findings.size(), std::size_t{2});
  for (const Finding& finding : findings) CHECK(finding.kind == FindingKind::kUnreadable);
}

struct Stopped {};

TEST(stopped_job_ends_its_workers_and_closes_its_files) {
  RandomSource random(530);
  const ThreadCheck threads_end;
  const std::size_t files_before = count_of_open_files();
  {
    const ScratchDir dir;
    VerifyJob job(dir.fd(), dir.path(), {4, 256 << 10, false});
    for (int f = 0; f < 4; ++f) {
      std::vector<Finding> findings;
      std::uint64_t file_bytes = 0;
      const std::string name = "f" + std::to_string(f);
      write_with_footer(random, dir, name, 3'000'000);
      job.add_file(name, &file_bytes, findings);
    }
    bool is_stopped = false;
    try {
      job.sum([] { throw Stopped(); });
    } catch (const Stopped&) {
      is_stopped = true;
    }
    // It may have been faster than the first poll.
    CHECK(is_stopped || job.done_bytes() == job.total_bytes());
  }
  CHECK(threads_end.holds());
  CHECK_EQ(count_of_open_files(), files_before);
}

}  // namespace
