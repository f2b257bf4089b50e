
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
WEAK PyObject *PyObject_Call(PyObject *, PyObject *, PyObject *);
WEAK PyObject *PyObject_Vectorcall(PyObject *, PyObject *const *, size_t, PyObject *);
WEAK PyObject *PyObject_VectorcallMethod(PyObject *, PyObject *const *, size_t, PyObject *);
WEAK int PyObject_IsTrue(PyObject *);
WEAK intptr_t PyObject_Hash(PyObject *);
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
    PyObject *tensor, *parameter, *float32, *float64, *bfloat16, *strided, *is_transformed, *nothing, *channels_last;
    PyObject *none, *hook_key, *ordered_dict, *function_transforms, *tracing_state, *graph_task, *global_hooks, *getrefcount;
    PyObject *dtype, *is_cpu, *layout, *is_nested, *is_neg, *data_ptr, *numel, *itemsize, *storage_offset, *untyped_storage,
        *nbytes, *is_contiguous, *dim, *shape, *requires_grad, *is_leaf, *grad_fn, *base, *backward_hooks, *register_hook_dict;
};
const Objects *o;

constexpr int64_t PART = 1 << 19;   // each part of a large tensor is measured by itself, as several threads do
constexpr int64_t LONG = 1 << 15;   // other threads of Python may run meanwhile

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
    int64_t n;
    int dtype;
    Order order;
};

Order order_of(PyObject *x) {
    if (Reference(call(x, o->is_contiguous)).is_true()) return CONTIGUOUS;
    if (Reference(call(x, o->dim)).number() != 4) return NONE;
    const Reference method(attribute(x, o->is_contiguous));
    if (!method.object) return NONE;
    return Reference(PyObject_Call(method.object, o->nothing, o->channels_last)).is_true() ? CHANNELS_LAST : NONE;
}

// A tensor that a module has just returned, or autograd just computed, has the whole storage, or none if that was freed.  Python's
// object for the storage would live as long as the storage, and be an object for the garbage collector for each tensor of each step.
enum Storage { CHECKED, FRESH };

// Whether the storage has the bytes of the tensor: it may have been shrunk or freed.
bool is_stored(PyObject *x, int64_t n, Storage kind) {
    const int64_t offset = Reference(call(x, o->storage_offset)).number();
    if (kind == FRESH && offset == 0) return true;
    const int64_t size = Reference(attribute(x, o->itemsize)).number();
    const Reference storage(call(x, o->untyped_storage));
    if (!storage.object || size < 0 || offset < 0) return false;
    return (n + offset) * size <= Reference(call(storage.object, o->nbytes)).number();
}

int dtype_of(PyObject *x) {
    const Reference dtype(attribute(x, o->dtype));
    return dtype.is(o->float32) ? 0 : dtype.is(o->float64) ? 1 : dtype.is(o->bfloat16) ? 2 : -1;
}

void *data_of(PyObject *x) {
    const int64_t data = Reference(call(x, o->data_ptr)).number();
    return data == -1 ? nullptr : reinterpret_cast<void *>(data);
}

bool is_on_host(PyObject *x) {
    const Reference type(PyObject_Type(x));
    return (type.is(o->tensor) || type.is(o->parameter)) && Reference(attribute(x, o->is_cpu)).is_true();
}

// What does not change while the same object has the same memory.
bool is_plain(PyObject *x) {
    if (!is_on_host(x) || !Reference(attribute(x, o->layout)).is(o->strided)) return false;
    if (!Reference(attribute(x, o->is_nested)).is_false() || !Reference(call(x, o->is_neg)).is_false()) return false;
    return Reference(PyObject_Vectorcall(o->is_transformed, &x, 1, nullptr)).is_false();
}

// What can change at any time: ``x.data = y`` replaces the memory, and a storage can be resized.
bool view_of(PyObject *x, View &view, int64_t most, Storage storage = CHECKED) {
    view.dtype = dtype_of(x);
    if (view.dtype < 0) return false;
    view.n = Reference(call(x, o->numel)).number();
    if (view.n <= 0 || view.n > most) return false;
    view.data = data_of(x);
    if (!view.data || !is_stored(x, view.n, storage)) return false;
    view.order = order_of(x);
    return view.order != NONE;
}

// A tensor that was found to be plain, and where its memory was then.  The object may be gone, and another may have its address.
struct Known {
    PyObject *x;
    void *data;
};

bool look(PyObject *x, View &view, Known *known, int64_t most) {
    if (!known) return is_plain(x) && view_of(x, view, most);
    if (known->x == x && is_on_host(x) && view_of(x, view, most) && view.data == known->data) return true;
    const bool found = is_plain(x) && view_of(x, view, most);
    *known = Known{found ? x : nullptr, found ? view.data : nullptr};
    return found;
}

struct Unlocked {  // lets other threads of Python run, if it takes long enough
    PyThreadState *state;
    explicit Unlocked(int64_t n) : state(n > LONG ? PyEval_SaveThread() : nullptr) {}
    ~Unlocked() {
        if (state) PyEval_RestoreThread(state);
    }
};

// Measure a tensor, and copy it if `copy` is not null; `wanted` may be -1 for a copy alone.
template <class T>
void measure_as(const View &view, int wanted, Record *row, void *copy) {
    const T *x = static_cast<const T *>(view.data);
    T *y = static_cast<T *>(copy);
    if (wanted < 0) {
        std::memcpy(y, x, view.n * sizeof(T));
        return;
    }
    for (int64_t i = 0; i < view.n; i += PART) {
        const int64_t length = view.n - i < PART ? view.n - i : PART;
        Record part;
        Record *const out = view.n > PART ? &part : row;
        if (y) measure_and_copy(x + i, y + i, length, wanted, out);
        else measure_one(x + i, length, wanted, out);
        if (view.n > PART) merge_records(&part, wanted, row);
    }
}

void measure_view(const View &view, int wanted, void *out, void *copy = nullptr) {
    const Unlocked unlocked(view.n);
    Record *const row = static_cast<Record *>(out);
    if (view.dtype == 0) measure_as<float>(view, wanted, row, copy);
    else if (view.dtype == 1) measure_as<double>(view, wanted, row, copy);
    else measure_as<uint16_t>(view, wanted, row, copy);
}

// A copy of a tensor, and what the tensor must still be for a difference.
struct Copied {
    void *data;
    int64_t n, dtype, order, shape;
};

int64_t shape_of(PyObject *x) {
    const Reference shape(attribute(x, o->shape));
    return shape.object ? PyObject_Hash(shape.object) : -1;
}

}  // namespace

// Take the objects that Python keeps alive; return whether the interpreter has all functions.
extern "C" int set_up(const void *objects) {
    o = static_cast<const Objects *>(objects);
    return PyObject_Type && PyObject_GetAttr && PyObject_Call && PyObject_Vectorcall && PyObject_VectorcallMethod &&
           PyObject_IsTrue && PyObject_Hash && PyList_GetItem && PyLong_AsLongLong && PyErr_Occurred && PyErr_Clear &&
           Py_DecRef && PyEval_SaveThread && PyEval_RestoreThread;
}

// Add the statistics of a tensor of at most `most` elements to a row; return whether that was done.
extern "C" int measure_tensor(PyObject *x, int64_t most, int wanted, void *row) {
    View view;
    if (!look(x, view, nullptr, most)) return 0;
    measure_view(view, wanted, row);
    return 1;
}

enum Done { MEASURED = 1, COPIED = 2 };

// The same for a list of tensors and the rows at these addresses; what is None counts as measured.
// `known` is the memory of this function for the next call with the same tensors, all zeros at first.
// If `copies` is not null, tensors with a `data` of at least n elements there are copied if they require gradients and their
// differences can be measured; `wanted` may then be -1.
extern "C" void measure_tensors(PyObject *tensors, int64_t count, int64_t most, const int32_t *wanted, void *const *rows,
                                void *known, void *copies, uint8_t *done) {
    Known *const each = static_cast<Known *>(known);
    for (int64_t i = 0; i < count; i++) {
        PyObject *const x = PyList_GetItem(tensors, i);
        View view;
        done[i] = x == o->none ? MEASURED : 0;
        if (done[i] || !look(x, view, each + i, most)) continue;
        Copied *const copy = copies ? static_cast<Copied *>(copies) + i : nullptr;
        const bool is_copied = copy && copy->data && view.dtype < 2 && view.n == copy->n &&
                               Reference(attribute(x, o->requires_grad)).is_true();
        if (is_copied) {
            copy->dtype = view.dtype, copy->order = view.order, copy->shape = shape_of(x);
            done[i] |= COPIED;
        }
        if (wanted[i] >= 0) done[i] |= MEASURED;
        if (done[i]) measure_view(view, wanted[i], rows[i], is_copied ? copy->data : nullptr);
    }
}

// The same for the differences of tensors and their copies; a tensor without a copy counts as measured.
extern "C" void measure_differences(PyObject *tensors, int64_t count, const int32_t *wanted, void *const *rows, void *known,
                                    const void *copies, uint8_t *done) {
    Known *const each = static_cast<Known *>(known);
    for (int64_t i = 0; i < count; i++) {
        if (!(done[i] & COPIED)) continue;
        const Copied &copy = static_cast<const Copied *>(copies)[i];
        PyObject *const x = PyList_GetItem(tensors, i);
        View view;
        done[i] = look(x, view, each + i, INT64_MAX) && view.n == copy.n && view.dtype == copy.dtype &&
                  view.order == copy.order && shape_of(x) == copy.shape ? MEASURED : 0;
        if (!done[i]) continue;
        const Unlocked unlocked(view.n);
        if (view.dtype == 0) measure_difference_float32(view.data, copy.data, view.n, wanted[i], rows[i]);
        else measure_difference_float64(view.data, copy.data, view.n, wanted[i], rows[i]);
    }
}
#endif
