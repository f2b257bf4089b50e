// The hooks of outputs of modules and of their gradients, and the usual events of steps of which only the loss is wanted, compiled with
// the headers of torch and Python as a library of its own.
//
// A hook in Python decides what is measured, and writes the result of its decision into a permit.  Until the permit ends, the
// functions below repeat the decision for the hooks that follow.  Whatever is not covered by the permit is left to Python.

#include <Python.h>
#include <structmember.h>

#include <ATen/SequenceNumber.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/PyInterpreter.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/csrc/dynamo/compiled_autograd.h>
#include <torch/csrc/utils/object_ptr.h>

#include <atomic>
#include <cstring>
#include <ctime>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

// The headers of these need much memory to compile, or files that the package of torch does not have.
namespace at::functorch {
struct DynamicLayer;
TORCH_API const std::vector<DynamicLayer> &getDynamicLayerStack();
}  // namespace at::functorch
namespace torch::jit::tracer {
struct TracingState;
TORCH_API const std::shared_ptr<TracingState> &getTracingState();
}  // namespace torch::jit::tracer
namespace torch::autograd {
TORCH_API int get_current_graph_task_id();
}  // namespace torch::autograd

namespace {

using at::Tensor;
using torch::autograd::variable_list;

// What may be measured without Python; `Permits` has the same order.
struct Permit {
    int64_t thread;        // the thread whose tensors are measured; 0 for none
    const int64_t *table;  // where the address of the first row is
    const int32_t *wanted; // by row, what to measure, or one of the values below
    int64_t rows;          // the number of rows in `wanted`
    int64_t task;          // the number of the running backward, for gradients
    int64_t forward;       // the number of the forward
    int64_t nanoseconds;   // spent here
    int64_t has_inputs;    // whether what modules receive is measured as well
};
constexpr int NOTHING = -1, PYTHON = -2;
constexpr int64_t LONG = 1 << 15;  // other threads of Python may run meanwhile

using Measure = void (*)(const void *x, int64_t n, int wanted, void *row);
Measure kernels[3];  // of float32, float64 and bfloat16
void (*merge)(const void *more, int wanted, void *row);
struct Row {
    double values[14];
};
const Row *empty;
PyObject *global_hooks;  // the forward hooks of all modules

int wanted_of(const Permit &permit, int64_t row) {
    return row < 0 ? NOTHING : row < permit.rows ? permit.wanted[row] : PYTHON;
}
bool is_of_this_thread(const Permit &permit) { return permit.thread == static_cast<int64_t>(PyThread_get_thread_ident()); }

int64_t now() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

bool is_transformed_or_traced() {
    return !at::functorch::getDynamicLayerStack().empty() || torch::jit::tracer::getTracingState();
}

// The kernel of a tensor whose numbers can be read from memory; the conditions are those of `Library.accepts`.
Measure kernel_of(const Tensor &x) {
    if (!x.device().is_cpu() || x.layout() != at::kStrided || !x.unsafeGetTensorImpl()->has_storage() || x.is_neg()) return nullptr;
    const auto dtype = x.scalar_type();
    const int number = dtype == at::kFloat ? 0 : dtype == at::kDouble ? 1 : dtype == at::kBFloat16 ? 2 : -1;
    if (number < 0 || x.numel() <= 0 || !(x.is_contiguous() || x.is_contiguous(at::MemoryFormat::ChannelsLast))) return nullptr;
    // the storage may have been shrunk or freed
    const auto &storage = x.storage();
    if (!storage.data() || static_cast<size_t>((x.numel() + x.storage_offset()) * x.itemsize()) > storage.nbytes()) return nullptr;
    return kernels[number];
}

Row *row_of(const Permit &permit, int64_t row) { return reinterpret_cast<Row *>(*permit.table) + row; }

void measure(const Tensor &x, Measure kernel, int wanted, Row *row) { kernel(x.const_data_ptr(), x.numel(), wanted, row); }

// The output that was measured last on this thread: most modules receive what another one has just returned, which is not read again.
// The object must still be the same, with the same memory and version.  Writes through ``.data`` change no version, so that some of the
// numbers are compared as well.
struct Latest {
    c10::weak_intrusive_ptr<c10::TensorImpl> tensor{c10::intrusive_ptr<c10::TensorImpl>()};
    const void *data = nullptr;
    uint32_t version = 0;
    uint64_t sample = 0;
    int wanted = 0;
    Row row;

    static uint64_t sample_of(const Tensor &x) {
        const auto *bytes = static_cast<const unsigned char *>(x.const_data_ptr());
        const int64_t size = x.numel() * x.itemsize(), words = size / 8, distance = words / 64 + 1;
        uint64_t hash = size, word = 0;
        for (int64_t i = 0; i < words; i += distance) {
            std::memcpy(&word, bytes + 8 * i, 8);
            hash = (hash ^ word) * UINT64_C(0x9E3779B97F4A7C15);
            hash ^= hash >> 29;
        }
        std::memcpy(&word, bytes + (size < 8 ? 0 : size - 8), size < 8 ? size : 8);
        return (hash ^ word) * UINT64_C(0x9E3779B97F4A7C15);
    }
    void set(const Tensor &x, int of) {
        tensor = c10::weak_intrusive_ptr<c10::TensorImpl>(x.getIntrusivePtr());
        data = x.const_data_ptr(), version = x._version(), sample = sample_of(x), wanted = of;
    }
    bool is(const Tensor &x, int also) const {
        return tensor._unsafe_get_target() == x.unsafeGetTensorImpl() && !tensor.expired() && (wanted & also) == also &&
               data == x.const_data_ptr() && version == x._version() && sample == sample_of(x);
    }
};
thread_local Latest latest;

// What is known of the gradient of one output of a forward.  It keeps the hook in Python, and the permits.
struct Gradient {
    const Permit *permit;
    int64_t row, forward;
    PyObject *kept;  // (hook, permits)
    mutable std::atomic<int> watches{0};  // of a parameter: how many results of `watch_parameters` exist
    Gradient(const Permit *permit, int64_t row, int64_t forward, PyObject *kept)
        : permit(permit), row(row), forward(forward), kept(kept) {}
    ~Gradient() {
        if (!Py_IsInitialized()) return;
        pybind11::gil_scoped_acquire gil;
        Py_DECREF(kept);
    }
    bool record(const Tensor &x) const {
        Permit &given = *const_cast<Permit *>(permit);
        const int64_t began = now();
        const int wanted = wanted_of(given, row);
        if (!is_of_this_thread(given) || given.forward != forward || wanted < 0 || is_transformed_or_traced() ||
            torch::autograd::get_current_graph_task_id() != given.task) return false;
        const Measure kernel = kernel_of(x);
        if (!kernel) return false;
        measure(x, kernel, wanted, row_of(given, row));
        given.nanoseconds += now() - began;
        return true;
    }
};

[[noreturn]] void raise() {
    python_error error;
    error.persist();
    throw error;
}

// The hook of a tensor of autograd: the native function, or else the hook in Python.
struct GradientHook : torch::autograd::FunctionPreHook {
    std::shared_ptr<const Gradient> gradient;
    size_t number;
    GradientHook(std::shared_ptr<const Gradient> gradient, size_t number) : gradient(std::move(gradient)), number(number) {}

    variable_list operator()(const variable_list &gradients) override {
        const Tensor &x = gradients.at(number);
        if (!(x.defined() && gradient->record(x))) {
            pybind11::gil_scoped_acquire gil;
            THPObjectPtr value(THPVariable_Wrap(x));
            if (!value || !THPObjectPtr(PyObject_CallOneArg(hook(), value.get()))) raise();
        }
        return gradients;
    }
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &args) const override {
        pybind11::gil_scoped_acquire gil;
        Py_INCREF(hook());
        args.add_tensor_pre_hook(c10::SafePyObject(hook(), getPyInterpreter()), static_cast<int>(number));
    }
    PyObject *hook() const { return PyTuple_GET_ITEM(gradient->kept, 0); }
};

using Shared = std::shared_ptr<const Gradient>;
const Shared &shared_of(PyObject *capsule) { return *static_cast<Shared *>(PyCapsule_GetPointer(capsule, nullptr)); }

// The hook of the node that adds to the gradient of a parameter; the hook in Python receives a tuple.
struct ParameterHook : GradientHook {
    explicit ParameterHook(Shared gradient) : GradientHook(std::move(gradient), 0) {}

    variable_list operator()(const variable_list &gradients) override {
        if (!gradient->watches || !gradients.at(0).defined() || gradient->record(gradients[0])) return gradients;
        pybind11::gil_scoped_acquire gil;
        THPObjectPtr value(THPVariable_Wrap(gradients[0]));
        THPObjectPtr values(value ? PyTuple_Pack(1, value.get()) : nullptr);
        if (!values || !THPObjectPtr(PyObject_CallOneArg(hook(), values.get()))) raise();
        return gradients;
    }
    void compiled_args(torch::dynamo::autograd::CompiledNodeArgs &args) const override {
        pybind11::gil_scoped_acquire gil;
        Py_INCREF(hook());
        args.add_pre_hook(c10::SafePyObject(hook(), getPyInterpreter()));
    }
};

using Node = c10::intrusive_ptr<torch::autograd::Node>;

// The node that adds to the gradient of a parameter, with the hook; null if there is none.  A node that lives on keeps its hook, as another
// thread may be calling it, and the hook does nothing while nothing is watched: the user's loss keeps the nodes until the next one exists.
Node watched_node(const Tensor &x, const Shared &gradient) {
    if (!x.requires_grad() || x.grad_fn()) return Node();
    Node node = torch::autograd::impl::grad_accumulator(x);
    if (!node) return node;
    for (const auto &known : node->pre_hooks()) {
        const auto *const ours = dynamic_cast<const ParameterHook *>(known.get());
        if (ours && ours->gradient == gradient) return node;
    }
    node->add_pre_hook(std::make_unique<ParameterHook>(gradient));
    return node;
}

// A node with a hook that is active as long as this exists.
struct Watched {
    Node node;
    Shared gradient;
    Watched(Node node, Shared of) : node(std::move(node)), gradient(std::move(of)) { gradient->watches++; }
    Watched(Watched &&other) = default;
    ~Watched() {
        if (gradient) gradient->watches--;
    }
};

// Register the hook on a tensor; not on a leaf, and not behind a hook of the user's.
bool arm(const Tensor &x, const Shared &gradient) {
    const auto &node = x.grad_fn();
    if (!node || !torch::autograd::impl::hooks(x).empty()) return false;
    node->add_tensor_pre_hook(std::make_unique<GradientHook>(gradient, x.output_nr()));
    return true;
}

// What is known of the only input and the first output of a module.
struct Output {
    Permit *permit;
    int64_t input_row, row, gradient_row;
    PyObject *forward_hooks;  // of an `nn.Linear`; None for other modules
    PyObject *gradients;      // by the number of the forward, a capsule with the gradient, or None
    PyObject *kept;
};

// Register the hook for the gradient of an output, if there is one.  An output of `nn.Linear` may be a view of a tensor that nothing else
// has; then the hook is registered on that tensor, because an operation in place would cut off a hook of the view.
// A second forward hook of such a module may have replaced the output.
bool watch(const Output &output, const Tensor &x) {
    if (!x.requires_grad()) return true;
    const int64_t forward = output.permit->forward;
    if (forward < 0 || forward >= PyList_GET_SIZE(output.gradients)) return false;
    PyObject *const capsule = PyList_GET_ITEM(output.gradients, forward);
    if (capsule == Py_None) return false;
    const Shared &gradient = shared_of(capsule);
    if (!x.is_view()) return arm(x, gradient);
    if (output.forward_hooks == Py_None || PyDict_Size(output.forward_hooks) != 1 || PyObject_Size(global_hooks)) return false;
    const Tensor base(x._base());
    return torch::autograd::impl::hooks(x).empty() && base.numel() == x.numel() && arm(base, gradient);
}

// The input that is measured, null for none: a module may have no input, or have overwritten it with its output.
// Several inputs are left to Python.
bool find_input(PyObject *inputs, PyObject *output, const Tensor *&found, Measure &kernel) {
    if (!PyTuple_CheckExact(inputs) || PyTuple_GET_SIZE(inputs) > 1) return false;
    PyObject *const input = PyTuple_GET_SIZE(inputs) ? PyTuple_GET_ITEM(inputs, 0) : output;
    if (input == output) return true;
    if (!THPVariable_CheckExact(input)) return false;
    found = &THPVariable_Unpack(input);
    return (kernel = kernel_of(*found));
}

bool record(const Output &output, PyObject *inputs, PyObject *object) {
    Permit &permit = *output.permit;
    const int wanted_input = wanted_of(permit, output.input_row), wanted = wanted_of(permit, output.row);
    const int wanted_gradient = wanted_of(permit, output.gradient_row);
    if (!is_of_this_thread(permit) || wanted_input == PYTHON || wanted == PYTHON || wanted_gradient == PYTHON ||
        !THPVariable_CheckExact(object) || is_transformed_or_traced()) return false;
    const Tensor &x = THPVariable_Unpack(object), *input = nullptr;
    const Measure kernel = kernel_of(x);
    Measure kernel_of_input = nullptr;
    if (!kernel || (wanted_input != NOTHING && !find_input(inputs, object, input, kernel_of_input)) ||
        (wanted_gradient != NOTHING && !watch(output, x))) return false;
    PyThreadState *const state = x.numel() > LONG || (input && input->numel() > LONG) ? PyEval_SaveThread() : nullptr;
    if (input && !input->is_inference() && latest.is(*input, wanted_input)) {
        merge(&latest.row, wanted_input, row_of(permit, output.input_row));
    } else if (input) {
        measure(*input, kernel_of_input, wanted_input, row_of(permit, output.input_row));
    }
    if (wanted != NOTHING && permit.has_inputs && !x.is_inference()) {
        latest.row = *empty;
        measure(x, kernel, wanted, &latest.row);
        latest.set(x, wanted);
        merge(&latest.row, wanted, row_of(permit, output.row));
    } else if (wanted != NOTHING) {
        measure(x, kernel, wanted, row_of(permit, output.row));
    }
    if (state) PyEval_RestoreThread(state);
    return true;
}

PyObject *record_output(PyObject *capsule, PyObject *const *arguments, Py_ssize_t count) {
    const Output &output = *static_cast<Output *>(PyCapsule_GetPointer(capsule, nullptr));
    const int64_t began = now();
    bool is_done = false;
    try {
        is_done = count == 2 && record(output, arguments[0], arguments[1]);
    } catch (...) {  // Python decides what to do with such a tensor
    }
    output.permit->nanoseconds += now() - began;
    return PyBool_FromLong(is_done);
}
PyMethodDef output_method = {"record_output", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(record_output)),
                             METH_FASTCALL, nullptr};

// -- steps of which only the loss is wanted --

// What is known of them; `CountedSteps` has the same order.
constexpr int LOSSES = 40;
struct Counted {
    int64_t thread;        // the thread whose events are handled here; 0 for none
    int64_t seen;          // the events of the open step so far
    int64_t takes_losses, is_observed;
    int64_t size, most;    // the number of the optimizer's parameters, and that of losses, of which Python counts the last
    int64_t nodes, behind; // the numbers of the first node of the open forward, and of the first behind it
    int64_t nanoseconds;   // spent on events
    double loss, threshold;
    int64_t nodes_at_end, nanoseconds_at_end;  // of the last step
    int64_t count, gradients_at;  // the number of losses, and that of the step whose gradients Python reads next
    double losses[LOSSES], ends[LOSSES];
};
enum Seen { AWAITED, CALLED, RETURNED, COMPUTING, STEPPING };

// Each function below does what the method of `IdleSteps` with its name does with an event, if the event is the usual one, and returns
// whether it was.  It touches few objects, because the caches are cold, and changes nothing before everything is checked.

using Name = const char;
// Return where an object of a class with slots has an attribute; a name belongs to one class.
template <Name *name> PyObject *&slot(PyObject *object) {
    static const Py_ssize_t offset = [object] {
        THPObjectPtr found(PyObject_GetAttrString(reinterpret_cast<PyObject *>(Py_TYPE(object)), name));
        if (!found || Py_TYPE(found.get()) != &PyMemberDescr_Type) throw std::runtime_error(name);
        return reinterpret_cast<PyMemberDescrObject *>(found.get())->d_member->offset;
    }();
    return *reinterpret_cast<PyObject **>(reinterpret_cast<char *>(object) + offset);
}
template <Name *name> bool set(PyObject *object, PyObject *made) {
    if (made) THPObjectPtr(std::exchange(slot<name>(object), made));
    return made;
}
template <Name *name> THPObjectPtr get(PyObject *object) {  // of another class
    static PyObject *const text = PyUnicode_InternFromString(name);
    return THPObjectPtr(PyObject_GetAttr(object, text));
}
bool refers(PyObject *reference, PyObject *object) {
    return PyWeakref_Check(reference) && PyWeakref_GetObject(reference) == object && object != Py_None;
}

constexpr Name ROOT[] = "_root", OUTPUT[] = "_output", CALL[] = "_call", ARGUMENTS[] = "_arguments", LOSS_ARGUMENTS[] = "_loss_arguments",
               OPTIMIZER[] = "_optimizer", RATES[] = "_rates", QUEUE[] = "_queue", CONTROL[] = "_control", REQUEST[] = "request",
               TRAINING[] = "training", GROUPS[] = "param_groups", COUNT[] = "count", HOOKS[] = "hooks";

bool is_tensor(PyObject *object) { return reinterpret_cast<PyObject *>(Py_TYPE(object)) == THPVariableClass; }
// Whether an object is one number of the host that can be read from memory.
bool is_number(PyObject *object) {
    return is_tensor(object) && THPVariable_Unpack(object).numel() == 1 && kernel_of(THPVariable_Unpack(object));
}
PyObject *only(PyObject *tuple) { return PyTuple_CheckExact(tuple) && PyTuple_GET_SIZE(tuple) == 1 ? PyTuple_GET_ITEM(tuple, 0) : nullptr; }
double value_of(PyObject *object) {
    const Tensor &x = THPVariable_Unpack(object);
    const void *const data = x.const_data_ptr();
    return x.scalar_type() == at::kFloat    ? *static_cast<const float *>(data)
           : x.scalar_type() == at::kDouble ? *static_cast<const double *>(data)
                                            : static_cast<float>(*static_cast<const c10::BFloat16 *>(data));
}

bool root_begins(Counted &steps, PyObject *idle, PyObject *const *arguments) {  // module, args, kwargs
    if (steps.seen != AWAITED || !refers(slot<ROOT>(idle), arguments[0]) || get<TRAINING>(arguments[0]).get() != Py_True ||
        !c10::GradMode::is_enabled() || is_transformed_or_traced() || c10::impl::TorchDispatchModeTLS::any_modes_set() ||
        torch::autograd::get_current_graph_task_id() != -1) return false;
    if (steps.is_observed && !set<ARGUMENTS>(idle, PyTuple_Pack(2, arguments[1], arguments[2]))) return false;
    steps.nodes = at::sequence_number::peek(), steps.seen = CALLED;
    return true;
}

bool root_ends(Counted &steps, PyObject *idle, PyObject *const *arguments) {  // module, args, kwargs, output
    if (steps.seen != CALLED || (is_tensor(arguments[3]) && !set<OUTPUT>(idle, PyWeakref_NewRef(arguments[3], nullptr)))) return false;
    steps.behind = at::sequence_number::peek(), steps.seen = RETURNED;
    return true;
}

bool loss_called(Counted &steps, PyObject *idle, PyObject *const *arguments) {  // module, args, kwargs, output
    PyObject *const given = arguments[1];
    if (steps.seen != RETURNED || !steps.takes_losses || slot<CALL>(idle) != Py_None || PyTuple_GET_SIZE(given) != 2 ||
        !refers(slot<OUTPUT>(idle), PyTuple_GET_ITEM(given, 0)) || PyDict_GET_SIZE(arguments[2]) ||
        !THPVariable_CheckExact(PyTuple_GET_ITEM(given, 1)) || !is_number(arguments[3]) || is_transformed_or_traced() ||
        torch::autograd::get_current_graph_task_id() != -1) return false;
    THPObjectPtr result(PyWeakref_NewRef(arguments[3], nullptr));
    if (!result || !set<CALL>(idle, PyTuple_Pack(3, arguments[0], PyTuple_GET_ITEM(given, 1), result.get()))) return false;
    if (steps.is_observed) set<LOSS_ARGUMENTS>(idle, Py_NewRef(given));
    steps.loss = value_of(arguments[3]);
    return true;
}

// The arguments are the roots, their gradients, and whether the backward adds to those of all leaves.
bool backward_starts(Counted &steps, PyObject *idle, PyObject *const *arguments) {
    PyObject *const root = only(arguments[0]), *const factor = only(arguments[1]), *const call = slot<CALL>(idle);
    if (steps.seen != RETURNED || call == Py_None || arguments[2] != Py_True || !root ||
        !refers(PyTuple_GET_ITEM(call, 2), root) || !is_number(root) || !factor || !is_number(factor) || value_of(factor) != 1 ||
        !(steps.loss <= steps.threshold) || is_transformed_or_traced()) return false;
    steps.seen = COMPUTING;
    return !steps.is_observed || set<LOSS_ARGUMENTS>(idle, PyTuple_New(0));
}

bool optimizer_begins(Counted &steps, PyObject *idle, PyObject *const *arguments) {  // optimizer, args, kwargs
    static PyObject *const lr = PyUnicode_InternFromString("lr"), *const params = PyUnicode_InternFromString("params");
    PyObject *const all = slot<RATES>(idle), *before = nullptr;
    if (steps.seen != COMPUTING || steps.count == steps.gradients_at || slot<CALL>(idle) == Py_None ||
        !refers(slot<OPTIMIZER>(idle), arguments[0]) || PyTuple_GET_SIZE(arguments[1]) > 1 || PyDict_GET_SIZE(arguments[2]) || torch::autograd::get_current_graph_task_id() != -1)
        return false;
    THPObjectPtr groups = get<GROUPS>(arguments[0]);
    if (!groups || !PyList_CheckExact(groups.get())) return false;
    const Py_ssize_t count = PyList_GET_SIZE(groups.get());
    if (PyList_GET_SIZE(all)) before = PyList_GET_ITEM(all, PyList_GET_SIZE(all) - 1);
    bool is_as_before = before && PyList_GET_SIZE(before) == count;
    int64_t size = 0;
    THPObjectPtr rates;
    for (int pass = 0; pass < 2; pass++) {  // the second one for rates that have changed
        if (pass && !(rates = THPObjectPtr(PyList_New(0)))) return false;
        for (Py_ssize_t i = 0; i < count; i++) {
            PyObject *const group = PyList_GET_ITEM(groups.get(), i);
            if (!PyDict_CheckExact(group)) return false;
            PyObject *const rate = PyDict_GetItem(group, lr), *const parameters = PyDict_GetItem(group, params);
            if (!rate || !PyFloat_CheckExact(rate) || PyFloat_AS_DOUBLE(rate) == 0 || !parameters || !PyList_CheckExact(parameters) ||
                (pass && PyList_Append(rates.get(), rate))) return false;
            if (!pass) size += PyList_GET_SIZE(parameters), is_as_before = is_as_before && PyList_GET_ITEM(before, i) == rate;
        }
        if (is_as_before) break;
    }
    if (size != steps.size || PyList_Append(all, is_as_before ? before : rates.get())) return false;
    steps.seen = STEPPING;
    return true;
}

bool optimizer_ends(Counted &steps, PyObject *idle, PyObject *const *arguments) {  // optimizer, args, kwargs
    PyObject *const control = slot<CONTROL>(idle);
    if (steps.seen != STEPPING || !steps.takes_losses || !refers(slot<OPTIMIZER>(idle), arguments[0]) || PyObject_Size(slot<QUEUE>(idle)) ||
        (control != Py_None && slot<REQUEST>(control) != Py_None) || steps.count + 1 >= steps.most)
        return false;  // the last step of a block ends the counting, in Python
    if (steps.is_observed && !set<ARGUMENTS>(idle, Py_BuildValue("((){})"))) return false;
    set<CALL>(idle, Py_NewRef(Py_None)), set<OUTPUT>(idle, Py_NewRef(Py_None));
    steps.losses[steps.count] = steps.loss, steps.ends[steps.count] = now() * 1e-9;
    steps.nodes_at_end = at::sequence_number::peek(), steps.nanoseconds_at_end = steps.nanoseconds;
    steps.count++, steps.seen = AWAITED;
    return true;
}

using Event = bool (*)(Counted &steps, PyObject *idle, PyObject *const *arguments);
const Event EVENTS[] = {root_begins, root_ends, loss_called, backward_starts, optimizer_begins, optimizer_ends};
const int ARGUMENT_COUNTS[] = {3, 4, 4, 3, 3, 3};

// What handles an event of a hook: of which number, and for which object of `IdleSteps`, to which it refers weakly.
struct Handler {
    Counted *steps;
    int64_t event;
    PyObject *reference, *kept;
};

// Handle an event if it is usual, and return whether it was, or -1 with an exception of the user's.
int handle(const Handler &handler, PyObject *arguments) {
    Counted &steps = *handler.steps;
    if (steps.thread != static_cast<int64_t>(PyThread_get_thread_ident()) || PyTuple_GET_SIZE(arguments) != ARGUMENT_COUNTS[handler.event])
        return false;
    const int64_t began = now();
    THPObjectPtr idle(Py_NewRef(PyWeakref_GetObject(handler.reference)));
    bool is_done = false;
    try {
        is_done = idle.get() != Py_None && EVENTS[handler.event](steps, idle.get(), &PyTuple_GET_ITEM(arguments, 0));
    } catch (const std::exception &) {  // of a tensor that cannot be read
    }
    if (is_done) steps.nanoseconds += now() - began;
    if (PyErr_Occurred()) {
        if (!PyErr_ExceptionMatches(PyExc_Exception)) return -1;
        PyErr_Clear();
    }
    return is_done;
}

// The slots of classes for what `__call__` does, so that a usual event needs no frame of Python: of a hook, and of what calls several.
ternaryfunc call_in_python;
PyObject *call_hook(PyObject *hook, PyObject *arguments, PyObject *names) {
    PyObject *const count = slot<COUNT>(hook);
    int is_done = false;
    if (count && PyCapsule_CheckExact(count) && !names) {
        is_done = handle(*static_cast<Handler *>(PyCapsule_GetPointer(count, nullptr)), arguments);
    }
    return is_done < 0 ? nullptr : is_done ? Py_NewRef(Py_None) : call_in_python(hook, arguments, names);
}
PyObject *call_each(PyObject *object, PyObject *arguments, PyObject *names) {
    THPObjectPtr hooks(Py_NewRef(slot<HOOKS>(object)));  // an immutable tuple
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(hooks.get()); i++) {
        if (!THPObjectPtr(PyObject_Call(PyTuple_GET_ITEM(hooks.get(), i), arguments, names))) return nullptr;
    }
    Py_RETURN_NONE;
}

}  // namespace

// Return what handles the event with a number; `kept` owns the memory of `steps`.
extern "C" PyObject *event_handler(int64_t steps, int64_t event, PyObject *idle, PyObject *kept) {
    THPObjectPtr reference(PyWeakref_NewRef(idle, nullptr));
    if (!reference) return nullptr;
    auto *const made = new Handler{reinterpret_cast<Counted *>(steps), event, reference.release(), Py_NewRef(kept)};
    return PyCapsule_New(made, nullptr, [](PyObject *capsule) {
        auto *const handler = static_cast<Handler *>(PyCapsule_GetPointer(capsule, nullptr));
        Py_DECREF(handler->reference), Py_DECREF(handler->kept);
        delete handler;
    });
}

// Call objects of a class without Python: its hooks where `count` handles the event, or each of its `hooks`.
extern "C" void call_natively(PyTypeObject *cls, int has_several) {
    if (!has_several && cls->tp_call != call_hook) call_in_python = cls->tp_call;
    cls->tp_call = has_several ? call_each : call_hook;
}

// Take the kernels and the function that merges rows, a row of no elements, and the forward hooks of all modules; Python keeps them alive.
extern "C" void set_up(void *const *functions, const void *row, PyObject *hooks) {
    for (int i = 0; i < 3; i++) kernels[i] = reinterpret_cast<Measure>(functions[i]);
    merge = reinterpret_cast<void (*)(const void *, int, void *)>(functions[3]);
    empty = static_cast<const Row *>(row);
    global_hooks = hooks;
}

// Return a function of the inputs and the output of a module that returns whether they were recorded; `kept` is what the other arguments
// point into.
extern "C" PyObject *output_function(int64_t permit, const int64_t *rows, PyObject *forward_hooks, PyObject *gradients, PyObject *kept) {
    Py_INCREF(kept);
    auto *const made = new Output{reinterpret_cast<Permit *>(permit), rows[0], rows[1], rows[2], forward_hooks, gradients, kept};
    THPObjectPtr capsule(PyCapsule_New(made, nullptr, [](PyObject *capsule) {
        auto *const output = static_cast<Output *>(PyCapsule_GetPointer(capsule, nullptr));
        Py_DECREF(output->kept);
        delete output;
    }));
    return PyCFunction_New(&output_method, capsule.get());
}

// Register the hook for the gradient of a tensor that is no view; return whether that was done.
extern "C" int watch_gradient(PyObject *x, PyObject *capsule) {
    try {
        return THPVariable_CheckExact(x) && arm(THPVariable_Unpack(x), shared_of(capsule));
    } catch (...) {
        return false;
    }
}

// Register hooks on the nodes that add to the gradients of parameters, one of `gradients` for each; return what keeps these nodes.
extern "C" PyObject *watch_parameters(PyObject *parameters, PyObject *gradients) {
    auto nodes = std::make_unique<std::vector<Watched>>();
    try {
        for (Py_ssize_t i = 0; i < PyList_GET_SIZE(parameters); i++) {
            PyObject *const x = PyList_GET_ITEM(parameters, i);
            if (THPVariable_CheckExact(x)) {
                const Shared &gradient = shared_of(PyList_GET_ITEM(gradients, i));
                nodes->emplace_back(watched_node(THPVariable_Unpack(x), gradient), gradient);
            }
        }
    } catch (const std::exception &error) {
        PyErr_SetString(PyExc_RuntimeError, error.what());
        return nullptr;
    }
    return PyCapsule_New(nodes.release(), nullptr, [](PyObject *capsule) {
        delete static_cast<std::vector<Watched> *>(PyCapsule_GetPointer(capsule, nullptr));
    });
}

// Return a capsule with what is known of a gradient; `kept` is the hook in Python, and the permits.
extern "C" PyObject *gradient_of(int64_t permit, int64_t row, int64_t forward, PyObject *kept) {
    Py_INCREF(kept);
    auto *const made = new Shared(new Gradient(reinterpret_cast<const Permit *>(permit), row, forward, kept));
    return PyCapsule_New(made, nullptr, [](PyObject *capsule) {
        delete static_cast<Shared *>(PyCapsule_GetPointer(capsule, nullptr));
    });
}
