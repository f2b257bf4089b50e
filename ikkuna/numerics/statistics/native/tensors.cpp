
// ---- the part that reads tensors through their Python objects --------------------------------------------------------
//
// One call checks and measures a tensor, or a list of tensors.  The conditions are those of `Library.accepts`; whatever does not
// meet them is left to Python.  Only functions of Python's interface that are the same in all its versions are used.  They are
// declared here, because the headers of Python are often not installed, and they are weak: where the interpreter does not export
// them, `set_up` returns 0, and the rest of the library works.

#ifdef __ELF__
#include <cstddef>

#define WEAK __attribute__((weak))
extern "C" {
struct PyObject;
struct PyThreadState;
WEAK PyObject *PyObject_Type(PyObject *);
WEAK PyObject *PyObject_GetAttr(PyObject *, PyObject *);
WEAK PyObject *PyObject_Vectorcall(PyObject *, PyObject *const *, size_t, PyObject *);
WEAK PyObject *PyObject_VectorcallMethod(PyObject *, PyObject *const *, size_t, PyObject *);
WEAK int PyObject_IsTrue(PyObject *);
WEAK PyObject *PyList_GetItem(PyObject *, intptr_t);
WEAK long long PyLong_AsLongLong(PyObject *);
WEAK PyObject *PyErr_Occurred();
WEAK void PyErr_Clear();
WEAK void Py_DecRef(PyObject *);
WEAK PyThreadState *PyEval_SaveThread();
WEAK void PyEval_RestoreThread(PyThreadState *);
}

namespace {

// What Python passes to `set_up`, in this order; it keeps these objects alive.
struct Objects {
    PyObject *tensor, *parameter;
    PyObject *none, *cdata, *is_neg, *requires_grad;
};
const Objects *o;

// Functions of torch's stable interface, in this order; they return 0, or another number for an error.
// A tensor is the address of the pointer that an `at::Tensor` consists of.
using Handle = void *const *;
struct Functions {
    int (*data_ptr)(Handle, void **);
    int (*numel)(Handle, int64_t *), (*dim)(Handle, int64_t *), (*offset)(Handle, int64_t *), (*nbytes)(Handle, int64_t *);
    int (*sizes)(Handle, const int64_t **), (*strides)(Handle, const int64_t **);
    int (*dtype)(Handle, int32_t *), (*device_type)(Handle, int32_t *), (*layout)(Handle, int32_t *);
    int32_t (*float32)(), (*float64)(), (*bfloat16)(), (*cpu)(), (*strided)();
};
const Functions *torch;

constexpr int64_t LONG = 1 << 15;  // other threads of Python may run meanwhile

// A reference that is released at the end of its scope.
struct Reference {
    PyObject *object;
    explicit Reference(PyObject *object) : object(object) {}
    Reference(const Reference &) = delete;
    ~Reference() {
        if (object) Py_DecRef(object);
        else PyErr_Clear();
    }
    bool is(PyObject *other) const { return object && object == other; }
    bool is_true() const { return object && PyObject_IsTrue(object) == 1; }
    bool is_false() const { return object && PyObject_IsTrue(object) == 0; }
    int64_t number() const {  // -1 for an error
        if (!object) return -1;
        const int64_t found = PyLong_AsLongLong(object);
        if (found == -1 && PyErr_Occurred()) PyErr_Clear();
        return found;
    }
};

PyObject *attribute(PyObject *x, PyObject *name) { return PyObject_GetAttr(x, name); }
PyObject *call(PyObject *x, PyObject *name) { return PyObject_VectorcallMethod(name, &x, 1, nullptr); }

enum Order { NONE, CONTIGUOUS, CHANNELS_LAST };

struct View {
    void *data;
    int64_t n, shape;  // the second is a hash
    int dtype;
    Order order;
};

template <class T>
bool gets(int (*function)(Handle, T *), Handle x, T *found) { return function(x, found) == 0; }
bool has(int (*function)(Handle, int32_t *), Handle x, int32_t (*value)()) {
    int32_t found;
    return gets(function, x, &found) && found == value();
}

// Whether memory has the order of these axes, the innermost first; axes of one element have any stride.
bool is_in_order(const int64_t *sizes, const int64_t *strides, const int *axes, int64_t dim) {
    int64_t expected = 1;
    for (int64_t i = 0; i < dim; i++) {
        const int64_t axis = axes ? axes[i] : dim - 1 - i;
        if (sizes[axis] != 1 && strides[axis] != expected) return false;
        expected *= sizes[axis];
    }
    return true;
}

bool set_order(Handle x, View &view) {
    int64_t dim;
    const int64_t *sizes, *strides;
    if (!gets(torch->dim, x, &dim) || !gets(torch->sizes, x, &sizes) || !gets(torch->strides, x, &strides)) return false;
    constexpr int last[] = {1, 3, 2, 0};
    view.order = is_in_order(sizes, strides, nullptr, dim) ? CONTIGUOUS
               : dim == 4 && is_in_order(sizes, strides, last, dim) ? CHANNELS_LAST : NONE;
    uint64_t hash = dim;
    for (int64_t i = 0; i < dim; i++) hash = (hash ^ sizes[i]) * UINT64_C(0x100000001b3) + 1;
    view.shape = static_cast<int64_t>(hash);
    return view.order != NONE;
}

bool set_dtype(Handle x, View &view) {
    int32_t dtype;
    if (!gets(torch->dtype, x, &dtype)) return false;
    view.dtype = dtype == torch->float32() ? FLOAT32 : dtype == torch->float64() ? FLOAT64 : dtype == torch->bfloat16() ? BFLOAT16 : -1;
    return view.dtype >= 0;
}

// Whether the storage has the bytes of the tensor: it may have been shrunk or freed.
bool is_stored(Handle x, const View &view) {
    int64_t offset, size;
    return gets(torch->offset, x, &offset) && gets(torch->nbytes, x, &size) && (view.n + offset) * BYTES[view.dtype] <= size;
}

// The view of a tensor that is on the host.  All of this can change at any time: ``x.data = y`` replaces the memory, and a storage
// can be resized.
bool view_of(PyObject *object, View &view) {
    const Reference type(PyObject_Type(object));
    if (!type.is(o->tensor) && !type.is(o->parameter)) return false;
    const int64_t address = Reference(attribute(object, o->cdata)).number();
    void *const tensor = reinterpret_cast<void *>(address);
    const Handle x = &tensor;
    return address > 0 && has(torch->device_type, x, torch->cpu) && has(torch->layout, x, torch->strided) && set_dtype(x, view) &&
           gets(torch->numel, x, &view.n) && view.n > 0 && set_order(x, view) &&
           gets(torch->data_ptr, x, &view.data) && view.data && is_stored(x, view);
}

// Whether the memory has the numbers themselves; this does not change while the same object has the same memory.
bool is_plain(PyObject *x) { return Reference(call(x, o->is_neg)).is_false(); }

// A tensor that was found to be plain, and where its memory was then.  The object may be gone, and another may have its address.
struct Known {
    PyObject *x;
    void *data;
};

bool look(PyObject *x, View &view, Known *known) {
    const bool is_readable = view_of(x, view);
    if (known && is_readable && known->x == x && known->data == view.data) return true;
    const bool found = is_readable && is_plain(x);
    if (known) *known = Known{found ? x : nullptr, found ? view.data : nullptr};
    return found;
}

struct Unlocked {  // lets other threads of Python run, if it takes long enough
    PyThreadState *state;
    explicit Unlocked(int64_t n) : state(n > LONG ? PyEval_SaveThread() : nullptr) {}
    ~Unlocked() {
        if (state) PyEval_RestoreThread(state);
    }
};

// Measure and count one tensor, or a difference.
void run_one(const Job &job, bool is_difference) {
    run(job, is_difference ? subtract_job : measure_job);
    count_job(job, is_difference);
}

// Do jobs for the tensors of a list.
void run_list(const std::vector<Job> &jobs, bool is_difference) {
    int64_t n = 0;
    for (const Job &job : jobs) n += job.n;
    const Unlocked unlocked(n);
    if (n > LONG) {
        run(jobs, is_difference ? subtract_job : measure_job);
        for_each(static_cast<int64_t>(jobs.size()), [&](int64_t i) { count_job(jobs[i], is_difference); });
    } else {
        for (const Job &job : jobs) run_one(job, is_difference);
    }
}

// A copy of a tensor, its size in bytes, and what the tensor must still be for a difference.  A tensor with another dtype than when the
// memory was reserved must not be copied: it may be larger.
struct Copied {
    void *data;
    int64_t bytes, dtype, order, shape;
};

}  // namespace

// Take the objects that Python keeps alive, and the functions; return whether the interpreter has all functions.
extern "C" int set_up(const void *objects, const void *functions) {
    o = static_cast<const Objects *>(objects);
    torch = static_cast<const Functions *>(functions);
    return PyObject_Type && PyObject_GetAttr && PyObject_Vectorcall && PyObject_VectorcallMethod && PyObject_IsTrue &&
           PyList_GetItem && PyLong_AsLongLong && PyErr_Occurred && PyErr_Clear && Py_DecRef && PyEval_SaveThread &&
           PyEval_RestoreThread;
}

enum Done { MEASURED = 1, COPIED = 2, COUNTED = 4 };

// Add the statistics of a tensor to a row, and overwrite `counts` with those of its codes if it has at most `most_counted` elements.
// Return what was done.
extern "C" int measure_tensor(PyObject *x, int wanted, void *row, void *counts, int64_t most_counted) {
    View view;
    if (!look(x, view, nullptr)) return 0;
    const bool is_counted = view.n <= most_counted;
    const Unlocked unlocked(view.n);
    int64_t *const counted = is_counted ? static_cast<int64_t *>(counts) : nullptr;
    run_one(Job{view.data, nullptr, view.n, view.dtype, wanted, static_cast<Record *>(row), counted}, false);
    return is_counted ? MEASURED | COUNTED : MEASURED;
}

constexpr int64_t LARGE = 1 << 21;  // bytes that caches would hardly keep until the differences are measured

// Where the codes of the tensors of a list are counted, or null, and the seeds of those that are sampled, else -1.
struct Counted {
    int64_t *counts, seed;
};
constexpr int32_t READABLE = -3;  // in place of what to measure: that the tensor can be read is enough

// The same for a list of tensors and the different rows at these addresses; what is None counts as measured.
// `known` is the memory of this function for the next call with the same tensors, all zeros at first.
// If `copies` is not null, tensors with a `data` of just their size there are copied if they require gradients and their
// differences can be measured; `wanted` may then be -1.  If `counted` is not null, the codes of those that are measured are counted.
extern "C" void measure_tensors(PyObject *tensors, int64_t count, const int32_t *wanted, void *const *rows, const void *counted,
                                void *known, void *copies, uint8_t *done) {
    Known *const each = static_cast<Known *>(known);
    const Counted *const counting = static_cast<const Counted *>(counted);
    std::vector<Job> jobs;
    const bool has_room = reserve(jobs, count);
    int64_t copied = 0;
    for (int64_t i = 0; i < count; i++) {
        PyObject *const x = PyList_GetItem(tensors, i);
        View view;
        done[i] = x == o->none ? MEASURED : 0;
        if (done[i] || !look(x, view, each + i)) continue;
        Copied *const copy = copies ? static_cast<Copied *>(copies) + i : nullptr;
        const bool is_copied = copy && copy->data && view.n * int64_t(BYTES[view.dtype]) == copy->bytes &&
                               Reference(attribute(x, o->requires_grad)).is_true();
        if (is_copied) {
            copy->dtype = view.dtype, copy->order = view.order, copy->shape = view.shape;
            done[i] |= COPIED;
        }
        if (wanted[i] >= 0 || wanted[i] == READABLE) done[i] |= MEASURED;
        if (wanted[i] < 0 && !is_copied) continue;
        Job job{view.data, is_copied ? copy->data : nullptr, view.n, view.dtype, wanted[i], static_cast<Record *>(rows[i])};
        if (counting && wanted[i] >= 0) job.counts = counting[i].counts, job.seed = counting[i].seed;
        if (has_room) jobs.push_back(job);
        else run_one(job, false);
        if (is_copied) copied += job.n * BYTES[job.dtype];
    }
    for (Job &job : jobs) job.is_large = copied > LARGE;
    run_list(jobs, false);
}

// The same for the differences of tensors and their copies; a tensor without a copy counts as measured.
extern "C" void measure_differences(PyObject *tensors, int64_t count, const int32_t *wanted, void *const *rows, const void *counted,
                                    void *known, const void *copies, uint8_t *done) {
    Known *const each = static_cast<Known *>(known);
    const Counted *const counting = static_cast<const Counted *>(counted);
    std::vector<Job> jobs;
    const bool has_room = reserve(jobs, count);
    for (int64_t i = 0; i < count; i++) {
        if (!(done[i] & COPIED)) continue;
        const Copied &copy = static_cast<const Copied *>(copies)[i];
        PyObject *const x = PyList_GetItem(tensors, i);
        View view;
        done[i] = look(x, view, each + i) && view.n * int64_t(BYTES[view.dtype]) == copy.bytes && view.dtype == copy.dtype && view.order == copy.order &&
                  view.shape == copy.shape ? MEASURED : 0;
        if (!done[i]) continue;
        Job job{view.data, copy.data, view.n, view.dtype, wanted[i], static_cast<Record *>(rows[i])};
        if (counting) job.counts = counting[i].counts, job.seed = counting[i].seed;
        if (has_room) jobs.push_back(job);
        else run_one(job, true);
    }
    run_list(jobs, true);
}
#endif
