// A state dict as a save planner sees it: taken apart by names, and what of it decides on the plan.
#pragma once

#include <pybind11/pybind11.h>

#include <string>

namespace dcpx {

// Reads the values of a state through their attributes: no torch header. Not thread-safe beyond
// the GIL.
class StateReader {
 public:
  // `parts`: by name, as `torch_dcpx/plan_fingerprint.py` lists them.
  explicit StateReader(const pybind11::dict& parts);

  // (flat, paths, whether a value is a ShardedTensor): torch's `flatten_state_dict`, with its
  // order, its names and its error.
  pybind11::tuple flatten(const pybind11::object& state) const;

  // Bytes that differ wherever the plans of two flat states do; None where a value is of a kind
  // that says itself how it is planned. `paths`: of all names, or None. Addresses of constants are
  // among them: they mean nothing to another process.
  pybind11::object fingerprint(const pybind11::dict& state, const pybind11::object& paths) const;

 private:
  friend class Flattener;
  friend class Fingerprint;

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
