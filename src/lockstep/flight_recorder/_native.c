/* The records of calls in C: the CallWriter of call_writer.py, with the same methods and the same bytes.
 *
 * Other processes read the memory meanwhile. What they find a record by is written with release order after the record
 * itself, and read with acquire order before it.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* as in layout.py: the state words, the phases, and the sizes of tables */
enum { PHASE = 64, SINCE = 65, RECORDS = 67, BATCH = 68, LOOP = 69, WAITED = 70, SINCE_RECORD = 75 };
enum { RUNS, WAITS };
enum { RING = 512, GROUP_SLOTS = 64, DEPTH = 128 };

/* layout.RECORD, and where in it the fields begin and end that ranks compare; the identity of a collective is first */
typedef struct {
    uint64_t number, key, sequence, fingerprint, line;
    int64_t batch;
    uint64_t loop;
    double entered, left;
    uint32_t what, call_site, group, name;
    int32_t peer;
    uint32_t rejected;
    int64_t tag;
} Record;
enum { COMPARED = offsetof(Record, key), COMPARED_BYTES = offsetof(Record, entered) - COMPARED };
enum { IDENTITY_BYTES = offsetof(Record, fingerprint) - COMPARED };

typedef struct {
    PyObject_HEAD
    Py_buffer memory;
    int64_t group_keys, last_sequences, record_numbers, ring; /* offsets */
} CallWriter;

static uint64_t *words(const CallWriter *w) { return w->memory.buf; }

static double *times(const CallWriter *w) { return w->memory.buf; }

static uint64_t load(const char *memory, int64_t offset) {
    return __atomic_load_n((const uint64_t *)(memory + offset), __ATOMIC_ACQUIRE);
}

static void store(const CallWriter *w, int64_t offset, uint64_t value) {
    __atomic_store_n((uint64_t *)((char *)w->memory.buf + offset), value, __ATOMIC_RELEASE);
}

/* The place of a record in a rank's memory */
static Record *record_at(const CallWriter *w, const char *memory, uint64_t number) {
    return (Record *)(memory + w->ring) + number % RING;
}

/* The offset of the number of a group's record */
static int64_t number_offset(const CallWriter *w, int64_t slot, uint64_t sequence) {
    return w->record_numbers + 8 * (slot * DEPTH + (int64_t)(sequence % DEPTH));
}

/* Whether a method can be called, with so many arguments */
static int is_ready(const CallWriter *w, Py_ssize_t given, Py_ssize_t wanted) {
    if (w->memory.buf != NULL && given == wanted) return 1;
    PyErr_Format(PyExc_TypeError, "expected %zd arguments, on a writer with memory; got %zd", wanted, given);
    return 0;
}

static int is_slot(int64_t slot) {
    if (slot >= 0 && slot < GROUP_SLOTS) return 1;
    PyErr_SetString(PyExc_ValueError, "no such slot");
    return 0;
}

static PyObject *writer_enter(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    CallWriter *w = (CallWriter *)self;
    if (!is_ready(w, n, 14)) return NULL;
    int64_t slot = PyLong_AsLongLong(args[1]);
    Record record = {
        .key = PyLong_AsUnsignedLongLong(args[0]),
        .sequence = PyLong_AsUnsignedLongLong(args[2]),
        .fingerprint = PyLong_AsUnsignedLongLong(args[3]),
        .line = PyLong_AsUnsignedLongLong(args[4]),
        .batch = (int64_t)words(w)[BATCH],
        .loop = args[13] == Py_None ? words(w)[LOOP] : PyLong_AsUnsignedLongLong(args[13]),
        .entered = PyFloat_AsDouble(args[11]),
        .what = (uint32_t)PyLong_AsUnsignedLong(args[5]),
        .call_site = (uint32_t)PyLong_AsUnsignedLong(args[6]),
        .group = (uint32_t)PyLong_AsUnsignedLong(args[7]),
        .name = (uint32_t)PyLong_AsUnsignedLong(args[8]),
        .peer = (int32_t)PyLong_AsLong(args[9]),
        .rejected = (uint32_t)PyLong_AsUnsignedLong(args[10]),
        .tag = PyLong_AsLongLong(args[12]),
    };
    if (PyErr_Occurred() || !is_slot(slot)) return NULL;
    record.number = words(w)[RECORDS] + 1;
    Record *at = record_at(w, w->memory.buf, record.number);
    /* first, so that whoever reads the record that was there sees that it is gone */
    __atomic_store_n(&at->number, record.number, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    *at = record;
    if (record.sequence > 0) {
        store(w, number_offset(w, slot, record.sequence), record.number);
        store(w, w->last_sequences + 8 * slot, record.sequence);
    }
    store(w, 8 * RECORDS, record.number);
    return PyLong_FromUnsignedLongLong(record.number);
}

static PyObject *writer_leave(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    CallWriter *w = (CallWriter *)self;
    if (!is_ready(w, n, 2)) return NULL;
    uint64_t number = PyLong_AsUnsignedLongLong(args[0]);
    double now = PyFloat_AsDouble(args[1]);
    if (PyErr_Occurred()) return NULL;
    Record *record = record_at(w, w->memory.buf, number);
    if (number + RING > words(w)[RECORDS] && record->left == 0) record->left = now;
    Py_RETURN_NONE;
}

static PyObject *writer_begin_wait(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    CallWriter *w = (CallWriter *)self;
    if (!is_ready(w, n, 2)) return NULL;
    uint64_t number = PyLong_AsUnsignedLongLong(args[0]);
    double now = PyFloat_AsDouble(args[1]);
    if (PyErr_Occurred()) return NULL;
    words(w)[SINCE_RECORD] = number;
    times(w)[SINCE] = now;
    store(w, 8 * PHASE, WAITS);
    Py_RETURN_NONE;
}

static PyObject *writer_end_wait(PyObject *self, PyObject *now_) {
    CallWriter *w = (CallWriter *)self;
    if (!is_ready(w, 1, 1)) return NULL;
    double now = PyFloat_AsDouble(now_);
    if (PyErr_Occurred()) return NULL;
    store(w, 8 * PHASE, RUNS);
    times(w)[WAITED] += now - times(w)[SINCE];
    times(w)[SINCE] = now;
    Py_RETURN_NONE;
}

/* The slot of a group in another rank's memory, which most often is that of this rank; -1 if it has none. */
static int64_t slot_of(const CallWriter *w, const char *memory, uint64_t key, int64_t own_slot) {
    if (load(memory, w->group_keys + 8 * own_slot) == key) return own_slot;
    for (int64_t slot = 0; slot < GROUP_SLOTS; slot++)
        if (load(memory, w->group_keys + 8 * slot) == key) return slot;
    return -1;
}

enum Answer { NOT_CALLED, SAME, OTHER };

/* What another rank has recorded as that collective of its group */
static enum Answer look_at(const CallWriter *w, const char *memory, const Record *own, int64_t own_slot) {
    int64_t slot = slot_of(w, memory, own->key, own_slot);
    uint64_t number = slot < 0 ? 0 : load(memory, number_offset(w, slot, own->sequence));
    if (number == 0) return NOT_CALLED;
    const char *theirs = (const char *)record_at(w, memory, number) + COMPARED, *mine = (const char *)own + COMPARED;
    if (memcmp(theirs, mine, COMPARED_BYTES) == 0) return SAME;
    return memcmp(theirs, mine, IDENTITY_BYTES) == 0 ? OTHER : NOT_CALLED;
}

static PyObject *writer_agrees(PyObject *self, PyObject *const *args, Py_ssize_t n) {
    CallWriter *w = (CallWriter *)self;
    if (!is_ready(w, n, 3)) return NULL;
    uint64_t number = PyLong_AsUnsignedLongLong(args[0]);
    int64_t slot = PyLong_AsLongLong(args[1]);
    if (PyErr_Occurred() || !is_slot(slot)) return NULL;
    if (!PyTuple_Check(args[2])) {
        PyErr_SetString(PyExc_TypeError, "expected a tuple of the others' memory");
        return NULL;
    }
    Py_ssize_t others = PyTuple_Size(args[2]);
    const Record *own = record_at(w, w->memory.buf, number);
    enum Answer answer = NOT_CALLED;
    for (Py_ssize_t i = 0; i < others && answer == NOT_CALLED; i++) {
        Py_buffer memory;
        if (PyObject_GetBuffer(PyTuple_GetItem(args[2], i), &memory, PyBUF_SIMPLE) < 0) return NULL;
        /* the layout is that of this rank, as the world size is */
        answer = memory.len == w->memory.len ? look_at(w, memory.buf, own, slot) : OTHER;
        PyBuffer_Release(&memory);
    }
    return PyBool_FromLong(answer != OTHER);
}

static PyObject *writer_attach(PyObject *self, PyObject *memory) {
    CallWriter *w = (CallWriter *)self;
    Py_buffer next;
    if (PyObject_GetBuffer(memory, &next, PyBUF_WRITABLE) < 0) return NULL;
    if (next.len < w->ring + (int64_t)sizeof(Record) * RING) {
        PyBuffer_Release(&next);
        PyErr_SetString(PyExc_ValueError, "the layout does not fit the memory");
        return NULL;
    }
    PyBuffer_Release(&w->memory);
    w->memory = next;
    Py_RETURN_NONE;
}

static int writer_init(PyObject *self, PyObject *args, PyObject *kwargs) {
    CallWriter *w = (CallWriter *)self;
    static char *names[] = {"memory", "group_keys", "last_sequences", "record_numbers", "ring", NULL};
    PyObject *memory;
    long long group_keys, last_sequences, record_numbers, ring;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OLLLL", names, &memory, &group_keys, &last_sequences,
                                     &record_numbers, &ring))
        return -1;
    /* the tables lie in this order, and the state words before them */
    if (group_keys <= 8 * SINCE_RECORD || last_sequences < group_keys + 8 * GROUP_SLOTS ||
        record_numbers < last_sequences + 8 * GROUP_SLOTS || ring < record_numbers + 8 * GROUP_SLOTS * DEPTH ||
        (group_keys | last_sequences | record_numbers | ring) % 8 != 0) {
        PyErr_SetString(PyExc_ValueError, "the layout is not that of a flight recorder");
        return -1;
    }
    w->group_keys = group_keys, w->last_sequences = last_sequences;
    w->record_numbers = record_numbers, w->ring = ring;
    PyObject *done = writer_attach(self, memory);
    Py_XDECREF(done);
    return done == NULL ? -1 : 0;
}

static void writer_dealloc(PyObject *self) {
    PyTypeObject *type = Py_TYPE(self);
    PyBuffer_Release(&((CallWriter *)self)->memory);
    PyObject_Free(self);
    Py_DECREF(type);
}

#define FAST(FUNCTION) (PyCFunction)(void (*)(void))FUNCTION, METH_FASTCALL
static PyMethodDef writer_methods[] = {
    {"enter", FAST(writer_enter),
     "enter(key, slot, sequence, fingerprint, line, what, call_site, group, name, peer, rejected, now, tag, loop)"},
    {"leave", FAST(writer_leave), "leave(number, now)"},
    {"begin_wait", FAST(writer_begin_wait), "begin_wait(number, now)"},
    {"end_wait", writer_end_wait, METH_O, "end_wait(now)"},
    {"agrees", FAST(writer_agrees), "agrees(number, slot, others): whether no other rank has called something else"},
    {"attach", writer_attach, METH_O, "attach(memory): write there from now on"},
    {NULL, NULL, 0, NULL},
};
static PyType_Slot writer_slots[] = {
    {Py_tp_new, PyType_GenericNew},
    {Py_tp_init, writer_init},
    {Py_tp_dealloc, writer_dealloc},
    {Py_tp_methods, writer_methods},
    {Py_tp_doc, "Writes the records of calls."},
    {0, NULL},
};
static PyType_Spec writer_spec = {
    "lockstep.flight_recorder._native.CallWriter", sizeof(CallWriter), 0, Py_TPFLAGS_DEFAULT, writer_slots,
};

static struct PyModuleDef module = {
    PyModuleDef_HEAD_INIT, "_native", "The records of the flight recorder, in C.", -1, NULL, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) {
    PyObject *m = PyModule_Create(&module);
    if (m == NULL) return NULL;
    PyObject *writer = PyType_FromSpec(&writer_spec);
    if (writer == NULL || PyModule_AddObject(m, "CallWriter", writer) < 0) {
        Py_DECREF(m);
        return NULL;
    }
    return m;
}
