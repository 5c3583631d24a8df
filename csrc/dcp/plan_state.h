// A state dict as a planner sees it: taken apart by names, what of it decides on a save's plan, and
// what of it is stored as a load wants it.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace dcpx {

class StoredColumns;

// Reads the values of a state through their attributes: no torch header. Not thread-safe beyond
// the GIL.
class StateReader {
 public:
  // `parts`: by name, as `torch_dcpx/planners/cache.py` lists them.
  explicit StateReader(const pybind11::dict& parts);

  // (flat, paths, whether a value is a ShardedTensor, whether a key is no plain str or an element
  // of a list has no value): torch's `flatten_state_dict`, with its order, its names and its error.
  pybind11::tuple flatten(const pybind11::object& state) const;

  // Bytes that differ wherever the plans of two flat states do; None where a value is of a kind
  // that says itself how it is planned. `paths`: of all names, or None. Addresses of constants are
  // among them: they mean nothing to another process.
  pybind11::object fingerprint(const pybind11::dict& state, const pybind11::object& paths) const;

  // The names of a flat state whose values are not seen to be whole tensors of the stored sizes
  // and, with `has_dtypes`, dtype. `entries`: of a StoredEntries, over these columns.
  pybind11::list unlike(const pybind11::dict& state, const pybind11::handle& entries,
                        const StoredColumns& columns, bool has_dtypes) const;

  // (rows of `make_read_items` by value of a flat state, None for those that are not seen to be
  // whole tensors of the stored sizes; place and name of each of these).
  pybind11::tuple whole_rows(const pybind11::dict& state, const pybind11::handle& entries,
                             const StoredColumns& columns) const;

 private:
  friend class Flattener;
  friend class Fingerprint;

  // Calls `take` (name, target, its shape, number of the entry) for each whole tensor of the stored
  // sizes, and `leave` (name) for all else, in the order of the state.
  template <typename Take, typename Leave>
  void each_target(const pybind11::dict& state, const pybind11::handle& entries,
                   const StoredColumns& columns, const Take& take, const Leave& leave) const;
  bool is_plain_tensor(const pybind11::handle& value) const;
  bool has_hooks(const pybind11::handle& value) const;  // in its own __dict__
  // Whether a value's class is one of Python's own without parts that a planner would look at.
  bool is_plain_leaf(const pybind11::handle& value) const;

  pybind11::object tensor_, parameter_, dtensor_, shard_, replicate_;
  pybind11::object kind_of_, describe_mesh_, describe_placement_, describe_value_;
  pybind11::tuple hooks_;  // names of attributes
  bool has_strides_;
  pybind11::object items_, shape_, dtype_, layout_, requires_grad_, is_pinned_, stride_, spec_,
      mesh_, placements_, local_, dim_;  // names, interned
};

}  // namespace dcpx
