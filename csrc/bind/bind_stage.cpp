// Staging: tensors come in and go out as DLPack capsules, a list at a time, as one call of Python's
// costs more than the copy of a small tensor.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <unistd.h>

#include <memory>
#include <set>
#include <utility>
#include <vector>

#include "bind/bind.h"
#include "bind/dlpack.h"
#include "bind/kept_objects.h"
#include "common/arena.h"
#include "common/bytes.h"
#include "dcp/fields.h"
#include "dcp/gil.h"
#include "dcp/python.h"
#include "device/cuda_driver.h"
#include "device/numa.h"
#include "device/pinned.h"
#include "device/source_events.h"
#include "engine/device_copies.h"
#include "engine/snapshot.h"

namespace dcpx {
namespace {

namespace py = pybind11;
using dlpack::DataType;
using dlpack::ManagedTensor;
using engine::SnapshotRow;

constexpr DataType kBytesType{1, 8, 1};  // uint8

// Python's end of an arena. release() leaves the memory to the tensors over it.
struct ArenaHandle {
  std::shared_ptr<Arena> arena;

  explicit ArenaHandle(std::shared_ptr<Arena> owned) : arena(std::move(owned)) {}
  ArenaHandle(ArenaHandle&&) = default;
  ~ArenaHandle() { release(); }

  void release() noexcept { let_go(std::move(arena)); }
  Arena& get() const {
    if (arena == nullptr) throw py::value_error("the arena was released");
    return *arena;
  }
  // What pin() has begun; null: nothing.
  device::Pinned* pinned() const { return static_cast<device::Pinned*>(get().kept()); }

  // Where memory that nobody has touched is to lie.
  void place_near(int device) const {
    Arena& memory = get();
    device::prefer_node(memory.data(), memory.size_bytes(), device::numa_node_of(device));
  }

  // Once an arena: what a driver has refused it refuses again.
  void pin(int device) const {
    Arena& memory = get();
    if (memory.kept() != nullptr) return;
    memory.keep(std::make_shared<device::Pinned>(
        device::Pinned::start(memory.data(), memory.size_bytes(), device)));
  }
};

// A tensor over an arena, which it keeps: torch's storage calls the deleter, from any thread.
struct LentTensor {
  ManagedTensor managed{};
  std::shared_ptr<Arena> arena;
  std::vector<std::int64_t> sizes_and_strides;

  static void end(ManagedTensor* managed) {
    std::unique_ptr<LentTensor> lent(static_cast<LentTensor*>(managed->manager));
    lent->arena->give_back();
  }
};

// Called for a capsule that nobody made a tensor of.
void drop_capsule(PyObject* capsule) {
  if (PyCapsule_IsValid(capsule, dlpack::kCapsuleName) == 0) return;
  auto* managed = static_cast<ManagedTensor*>(PyCapsule_GetPointer(capsule, dlpack::kCapsuleName));
  managed->deleter(managed);
}

py::object lend(const std::shared_ptr<Arena>& arena, std::byte* data, const DataType& dtype,
                const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& strides) {
  auto lent = std::make_unique<LentTensor>();
  lent->arena = arena;
  lent->sizes_and_strides = sizes;
  lent->sizes_and_strides.insert(lent->sizes_and_strides.end(), strides.begin(), strides.end());
  dlpack::Tensor& tensor = lent->managed.tensor;
  tensor.data = data;
  tensor.device = {dlpack::kHost, 0};
  tensor.dims = static_cast<std::int32_t>(sizes.size());
  tensor.dtype = dtype;
  tensor.sizes = lent->sizes_and_strides.data();
  tensor.strides = tensor.sizes + sizes.size();
  lent->managed.manager = lent.get();
  lent->managed.deleter = &LentTensor::end;
  PyObject* capsule = PyCapsule_New(&lent->managed, dlpack::kCapsuleName, &drop_capsule);
  if (capsule == nullptr) throw py::error_already_set();
  arena->lend();
  [[maybe_unused]] const auto* const owned_by_capsule = lent.release();
  return py::reinterpret_steal<py::object>(capsule);
}

// What is to be staged, laid out. An entry is the capsule of a host tensor, or (capsule, device) of
// one on a CUDA device, or the fields (address, elem_bytes, sizes, strides, device, owner) of one
// whose dtype DLPack does not know; at address 0 only its place is wanted. The latter come back as
// plain bytes.
class StageTable {
 public:
  explicit StageTable(const py::list& entries) : entries_(entries) {
    const auto count = static_cast<std::size_t>(PyTuple_GET_SIZE(entries_.ptr()));
    rows_.reserve(count);
    types_.reserve(count);
    for (const py::handle& entry : entries_) add(entry);
    nbytes_ = engine::lay_out(rows_);
  }

  std::uint64_t nbytes() const { return nbytes_; }
  std::size_t size() const { return rows_.size(); }
  // The last tensor that has elements but no memory; -1: none.
  std::int64_t nowhere() const { return nowhere_; }

  // The devices that some of it lies on, ascending.
  std::vector<int> devices() const {
    std::set<int> found;
    for (const SnapshotRow& row : rows_) {
      if (row.device >= 0 && row.nbytes > 0) found.insert(row.device);
    }
    return {found.begin(), found.end()};
  }
  const std::vector<SnapshotRow>& rows() const { return rows_; }

  // (offset, bytes) of each.
  py::list places() const {
    py::list out(rows_.size());
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      out[i] = py::make_tuple(rows_[i].offset, rows_[i].nbytes);
    }
    return out;
  }

  // A tensor over `handle` for each; what was staged need not be there yet.
  py::list capsules(const ArenaHandle& handle) const {
    DCPX_CHECK(nbytes_ <= handle.get().size_bytes(), "an arena too small for what is staged");
    const std::shared_ptr<Arena> arena = handle.arena;
    py::list out(rows_.size());
    for (std::size_t i = 0; i < rows_.size(); ++i) {
      const SnapshotRow& row = rows_[i];
      std::byte* const data = arena->data() + row.offset;
      out[i] = is_raw(i)
                   ? lend(arena, data, kBytesType, {static_cast<std::int64_t>(row.nbytes)}, {1})
                   : lend(arena, data, types_[i], row.sizes, row.strides);
    }
    return out;
  }

  // Sizes and strides of the staged tensor at `index`, in elements.
  py::tuple form(std::size_t index) const {
    DCPX_CHECK(index < rows_.size(), "no such row");
    return py::make_tuple(py::tuple(py::cast(rows_[index].sizes)),
                          py::tuple(py::cast(rows_[index].strides)));
  }

 private:
  bool is_raw(std::size_t index) const { return types_[index].bits == 0; }

  void add(const py::handle& entry) {
    SnapshotRow row;
    DataType type{};
    if (PyCapsule_CheckExact(entry.ptr()) != 0) {
      type = describe_capsule(entry, row);
    } else if (PyTuple_Check(entry.ptr()) != 0 && PyTuple_GET_SIZE(entry.ptr()) == 2) {
      row.device = to_device(field(entry, 1));
      type = describe_capsule(field(entry, 0), row);
    } else {
      check_tuple(entry, 6, "an entry is a capsule, or has 2 or 6 fields");
      row.source = reinterpret_cast<const std::byte*>(to_u64(field(entry, 0)));
      row.elem_bytes = to_u64(field(entry, 1));
      row.sizes = int_tuple(field(entry, 2));
      row.strides = int_tuple(field(entry, 3));
      row.device = to_device(field(entry, 4));
      engine::describe(row);
    }
    rows_.push_back(std::move(row));
    types_.push_back(type);
  }

  static int to_device(const py::handle& value) {
    const long number = PyLong_AsLong(value.ptr());
    if (number == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
    DCPX_CHECK(number >= -1 && number <= INT32_MAX, "a device is -1 or a CUDA ordinal");
    return static_cast<int>(number);
  }

  DataType describe_capsule(const py::handle& capsule, SnapshotRow& row) {
    const auto* managed = static_cast<const ManagedTensor*>(
        PyCapsule_GetPointer(capsule.ptr(), dlpack::kCapsuleName));
    if (managed == nullptr) throw py::error_already_set();
    const dlpack::Tensor& tensor = managed->tensor;
    DCPX_CHECK(row.device >= 0 || tensor.device.type == dlpack::kHost,
               "a tensor of a device, which is not said, in a snapshot");
    DCPX_CHECK(tensor.dtype.bits * tensor.dtype.lanes % 8 == 0, "elements of broken bytes");
    row.source = static_cast<const std::byte*>(tensor.data) + tensor.byte_offset;
    row.elem_bytes = static_cast<std::uint64_t>(tensor.dtype.bits) * tensor.dtype.lanes / 8;
    row.sizes.assign(tensor.sizes, tensor.sizes + tensor.dims);
    row.strides.resize(row.sizes.size(), 1);
    if (tensor.strides != nullptr) {
      row.strides.assign(tensor.strides, tensor.strides + tensor.dims);
    } else {
      for (std::size_t d = row.sizes.size(); d-- > 1;) {
        row.strides[d - 1] = row.strides[d] * row.sizes[d];
      }
    }
    engine::describe(row);
    if (row.nbytes > 0 && tensor.data == nullptr) {
      nowhere_ = static_cast<std::int64_t>(rows_.size());
      row.source = nullptr;
    }
    return tensor.dtype;
  }

  py::tuple entries_;  // keeps the sources' memory
  std::vector<SnapshotRow> rows_;
  std::vector<DataType> types_;
  std::uint64_t nbytes_ = 0;
  std::int64_t nowhere_ = -1;
};

// The copies of a snapshot's rows on devices, which may go on. Until they are done it keeps the
// sources, and the arena lent. A forked child has no part in them.
class StagedCopies {
 public:
  StagedCopies(const ArenaHandle& handle, py::object table, const StageTable& rows,
               const device::SourceEvents* after)
      : table_(std::move(table)),
        arena_(handle.arena),
        copies_(std::make_unique<engine::DeviceCopies>(rows.rows(), arena_->data(), after,
                                                       handle.pinned())) {
    arena_->lend();
  }
  StagedCopies(const StagedCopies&) = delete;
  StagedCopies& operator=(const StagedCopies&) = delete;
  ~StagedCopies() {  // with the GIL, as the sources need it
    if (!is_own_process()) {
      [[maybe_unused]] const auto* const parents = copies_.release();
      return;
    }
    bool has_ended = false;
    {
      const ReleasedGil no_gil;
      has_ended = copies_->drain();
    }
    if (has_ended) {
      arena_->give_back();
      let_go(std::move(arena_));
      return;
    }
    const std::shared_ptr<void> lent(arena_.get(), [arena = arena_](void*) { arena->give_back(); });
    // Copies may still read the sources, and write to the arena, which stays lent and mapped.
    device::let_go_when_unused(lent);
    keep_while_copied(std::move(table_));
  }

  engine::DeviceCopies& copies() {
    if (is_own_process()) return *copies_;
    throw Error(ErrorCode::kStaging,
                "these copies belong to the process that this one was forked from");
  }
  bool is_done() {
    engine::DeviceCopies& mine = copies();
    const ReleasedGil no_gil;
    return mine.is_done();
  }
  void wait(double timeout_s) {
    engine::DeviceCopies& mine = copies();
    const ReleasedGil no_gil;
    mine.wait(signal_poll(), timeout_s);
  }
  void hold_back(const std::vector<device::CallerStream>& streams) {
    engine::DeviceCopies& mine = copies();
    const ReleasedGil no_gil;
    mine.hold_back(streams, signal_poll());
  }

 private:
  bool is_own_process() const { return ::getpid() == owner_; }

  ::pid_t owner_ = ::getpid();
  py::object table_;
  std::shared_ptr<Arena> arena_;
  std::unique_ptr<engine::DeviceCopies> copies_;
};

// Returns what still goes on, with `overlap`; else nothing does.
std::unique_ptr<StagedCopies> snapshot(const ArenaHandle& handle, const py::object& table,
                                       unsigned workers, const device::SourceEvents* after,
                                       bool overlap) {
  const auto& rows = py::cast<const StageTable&>(table);
  DCPX_CHECK(rows.nbytes() <= handle.get().size_bytes(), "an arena too small for what is staged");
  auto staged = std::make_unique<StagedCopies>(handle, table, rows, after);
  {
    const std::shared_ptr<Arena> arena = handle.arena;
    const ReleasedGil no_gil;
    const bool is_new = arena->touched_bytes() < rows.nbytes();
    FirstTouch pages(arena->data(), arena->huge_bytes());
    engine::take_snapshot(rows.rows(), arena->data(), workers, signal_poll(), &staged->copies(),
                          is_new ? &pages : nullptr);
    arena->note_touched(rows.nbytes(), pages);
    if (!overlap) staged->copies().wait(signal_poll());
  }
  return overlap ? std::move(staged) : nullptr;
}

py::object lend_bytes(const ArenaHandle& handle, std::uint64_t offset, std::uint64_t nbytes) {
  DCPX_CHECK(checked_add(offset, nbytes) <= handle.get().size_bytes(), "a place behind the arena");
  return lend(handle.arena, handle.arena->data() + offset, kBytesType,
              {static_cast<std::int64_t>(nbytes)}, {1});
}

}  // namespace

void bind_stage(py::module_& m) {
  py::class_<ArenaHandle>(m, "Arena")
      .def(py::init([](std::uint64_t nbytes, bool is_shared) {
             return ArenaHandle(std::make_shared<Arena>(nbytes, is_shared));
           }),
           py::arg("nbytes"), py::kw_only(), py::arg("is_shared") = false)
      .def_static(
          "attach",
          [](int fd, std::uint64_t nbytes) {
            return ArenaHandle(std::make_shared<Arena>(Arena::attach(fd, nbytes)));
          },
          py::arg("fd"), py::arg("nbytes"))
      .def_property_readonly("nbytes",
                             [](const ArenaHandle& self) { return self.get().size_bytes(); })
      .def_property_readonly("address",
                             [](const ArenaHandle& self) {
                               return reinterpret_cast<std::uintptr_t>(self.get().data());
                             })
      .def_property_readonly("fd", [](const ArenaHandle& self) { return self.get().fd(); })
      .def_property_readonly("lent", [](const ArenaHandle& self) { return self.get().lent(); })
      .def_property_readonly("written",
                             [](const ArenaHandle& self) { return self.get().written(); })
      .def("add_written", [](const ArenaHandle& self) { self.get().add_written(); })
      .def_property_readonly("taken_bytes",
                             [](const ArenaHandle& self) { return self.get().taken_bytes(); })
      .def("lend", &lend_bytes, py::arg("offset"), py::arg("nbytes"))
      .def(
          "prefault",
          [](const ArenaHandle& self, unsigned workers) {
            const std::shared_ptr<Arena> arena = self.arena;
            Arena& memory = self.get();
            const ReleasedGil no_gil;
            memory.prefault(workers, signal_poll());
          },
          py::arg("workers"))
      .def("place_near", &ArenaHandle::place_near, py::arg("device"))
      .def("pin", &ArenaHandle::pin, py::arg("device"))
      .def_property_readonly("is_pin_begun",
                             [](const ArenaHandle& self) { return self.pinned() != nullptr; })
      .def_property_readonly("pinned_bytes",
                             [](const ArenaHandle& self) {
                               const device::Pinned* const pinned = self.pinned();
                               return pinned == nullptr ? 0 : pinned->pinned_bytes();
                             })
      .def("release", &ArenaHandle::release);

  py::class_<StageTable>(m, "StageTable")
      .def(py::init<const py::list&>(), py::arg("entries"))
      .def_property_readonly("nbytes", &StageTable::nbytes)
      .def_property_readonly("nowhere", &StageTable::nowhere)
      .def_property_readonly("devices", &StageTable::devices)
      .def("__len__", &StageTable::size)
      .def("places", &StageTable::places)
      .def("form", &StageTable::form, py::arg("index"))
      .def("capsules", &StageTable::capsules, py::arg("arena"));
  py::class_<StagedCopies>(m, "StagedCopies")
      .def_property_readonly("is_done", &StagedCopies::is_done)
      .def("wait", &StagedCopies::wait, py::arg("timeout_s"))
      .def("hold_back", &StagedCopies::hold_back, py::arg("streams"));
  m.def("snapshot", &snapshot, py::arg("arena"), py::arg("table"), py::arg("workers"),
        py::arg("after") = nullptr, py::arg("overlap") = false);
}

}  // namespace dcpx
