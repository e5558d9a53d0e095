//! NCCL, looked up at run time: what carries between GPUs that do not reach each other's memory.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr::null_mut;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread::{self, JoinHandle};

use cudarc::driver::sys;
use libloading::Library;

use super::context::Context;
use super::library::{self, symbol};
use crate::cuda::driver::{Carrier, DevicePointer, StreamHandle};
use crate::cuda::{DeviceFacts, DriverError};

/// Its names, the first one that there is.
const NAMES: [&str; 2] = ["libnccl.so.2", "libnccl.so"];
/// The first version whose calls can be captured, as `ncclGetVersion` says it: 2.9.
const LEAST_VERSION: c_int = 20_900;
/// `ncclSuccess` and `ncclInProgress` of `ncclResult_t`.
const SUCCESS: c_int = 0;
const IN_PROGRESS: c_int = 7;
/// `ncclUint8` of `ncclDataType_t`.
const BYTES: c_int = 1;

/// `ncclUniqueId`: what the ranks of a group have in common.
#[repr(C)]
#[derive(Clone, Copy)]
struct UniqueId([c_char; 128]);

/// `ncclComm_t`: a rank's place in a group.
type Place = *mut c_void;

/// The functions that are used, as `nccl.h` declares them.
struct Nccl {
    get_unique_id: unsafe extern "C" fn(*mut UniqueId) -> c_int,
    comm_init_rank: unsafe extern "C" fn(*mut Place, c_int, UniqueId, c_int) -> c_int,
    comm_abort: unsafe extern "C" fn(Place) -> c_int,
    comm_get_async_error: unsafe extern "C" fn(Place, *mut c_int) -> c_int,
    all_gather: unsafe extern "C" fn(*const c_void, *mut c_void, usize, c_int, Place, sys::CUstream) -> c_int,
    get_error_string: unsafe extern "C" fn(c_int) -> *const c_char,
    group_start: unsafe extern "C" fn() -> c_int,
    group_end: unsafe extern "C" fn() -> c_int,
    version: c_int,
    /// Stays while the functions may be called.
    _library: Library,
}

impl Nccl {
    /// The library of this process, found once.
    fn find() -> Result<&'static Nccl, DriverError> {
        static FOUND: OnceLock<Result<Nccl, DriverError>> = OnceLock::new();
        FOUND.get_or_init(|| Nccl::open(&NAMES)).as_ref().map_err(Clone::clone)
    }

    /// The first of these libraries that there is.
    fn open(names: &[&str]) -> Result<Nccl, DriverError> {
        // SAFETY: what loading NCCL runs sets up its own state alone; the symbols are NCCL's, whose types are those of their
        // fields; the library stays with them.
        unsafe {
            let library = library::open(names)?;
            let get_version = symbol::<unsafe extern "C" fn(*mut c_int) -> c_int>(&library, c"ncclGetVersion")?;
            let mut version = 0;
            let asked = get_version(&mut version);
            let nccl = Nccl {
                get_unique_id: symbol(&library, c"ncclGetUniqueId")?,
                comm_init_rank: symbol(&library, c"ncclCommInitRank")?,
                comm_abort: symbol(&library, c"ncclCommAbort")?,
                comm_get_async_error: symbol(&library, c"ncclCommGetAsyncError")?,
                all_gather: symbol(&library, c"ncclAllGather")?,
                get_error_string: symbol(&library, c"ncclGetErrorString")?,
                group_start: symbol(&library, c"ncclGroupStart")?,
                group_end: symbol(&library, c"ncclGroupEnd")?,
                version,
                _library: library,
            };
            nccl.call("ncclGetVersion", asked)?;
            match nccl.version {
                LEAST_VERSION.. => Ok(nccl),
                _ => Err(DriverError::refused("ncclGetVersion", format!("{} is too old: 2.9 is needed", nccl.name()))),
            }
        }
    }

    fn name(&self) -> String {
        format!("NCCL {}.{}.{}", self.version / 10_000, self.version / 100 % 100, self.version % 100)
    }

    /// An error unless it succeeded.
    fn call(&self, name: &'static str, result: c_int) -> Result<(), DriverError> {
        match result {
            SUCCESS => Ok(()),
            _ => Err(DriverError::refused(name, self.words(result))),
        }
    }

    fn words(&self, result: c_int) -> String {
        // SAFETY: NCCL gives a text that lives as long as the program, for any number.
        let words = unsafe { CStr::from_ptr((self.get_error_string)(result)) };
        format!("{}: {}", self.name(), words.to_string_lossy())
    }
}

/// A connected group, one GPU for each rank.
pub(super) struct NcclGroup {
    nccl: &'static Nccl,
    contexts: Vec<Context>,
    /// Each rank's, while the group has not ended. Who holds one uses it: NCCL allows that to one thread at a time.
    places: Vec<Mutex<Option<Held>>>,
    /// Ends the group: it waits until nothing of it runs and no graph names it any more.
    ending: Mutex<Option<JoinHandle<()>>>,
}

/// A rank's place.
struct Held(Place);

// SAFETY: NCCL's handles may be used from any thread, by one at a time, which is who holds the lock.
unsafe impl Send for Held {}

impl NcclGroup {
    /// Connects these GPUs, in the order of ranks, by the library of this machine.
    pub fn connect(devices: &[&DeviceFacts]) -> Result<Arc<NcclGroup>, DriverError> {
        let nccl = Nccl::find()?;
        let contexts = devices.iter().map(|facts| Context::of(facts.ordinal)).collect::<Result<Vec<_>, _>>()?;
        let mut id = UniqueId([0; 128]);
        // SAFETY: the place is valid for the write.
        nccl.call("ncclGetUniqueId", unsafe { (nccl.get_unique_id)(&mut id) })?;
        let mut places = vec![null_mut(); devices.len()];
        let joined = join(nccl, &contexts, id, &mut places);
        let held = |place: Place| Mutex::new((!place.is_null()).then_some(Held(place)));
        let places = places.into_iter().map(held).collect();
        let group = NcclGroup { nccl, contexts, places, ending: Mutex::default() };
        joined.map(|()| Arc::new(group))
    }
}

/// Gives every rank its place: from one thread, so all at once.
fn join(nccl: &Nccl, contexts: &[Context], id: UniqueId, places: &mut [Place]) -> Result<(), DriverError> {
    let ranks = contexts.len() as c_int;
    // SAFETY: a group is begun and ended, and the places are valid for the writes until then.
    unsafe {
        nccl.call("ncclGroupStart", (nccl.group_start)())?;
        let each = (0..ranks).zip(contexts).zip(places).try_for_each(|((rank, context), place)| {
            context.bind()?;
            nccl.call("ncclCommInitRank", (nccl.comm_init_rank)(place, ranks, id, rank))
        });
        each.and(nccl.call("ncclCommInitRank", (nccl.group_end)()))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Carrier for NcclGroup {
    fn name(&self) -> String {
        self.nccl.name()
    }

    fn all_gather(
        &self,
        rank: usize,
        at: DevicePointer,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        const CALL: &str = "ncclAllGather";
        self.contexts[rank].bind()?;
        let place = lock(&self.places[rank]);
        let Some(Held(place)) = &*place else { return Err(DriverError::refused(CALL, "the group has ended")) };
        let (own, all) = (at.plus(rank * bytes).0 as *const c_void, at.0 as *mut c_void);
        // SAFETY: device memory alone, in which all parts lie; what it has of its own is where NCCL would put it.
        let issued = unsafe { (self.nccl.all_gather)(own, all, bytes, BYTES, *place, stream.0 as sys::CUstream) };
        self.nccl.call(CALL, issued)
    }

    fn abort(&self) {
        let places = self.places.iter().filter_map(|place| lock(place).take()).collect::<Vec<_>>();
        if !places.is_empty() {
            let nccl = self.nccl;
            // By itself: the last call waits for the graphs that name the group, which are the ranks' to end.
            *lock(&self.ending) = Some(thread::spawn(move || end(nccl, places)));
        }
    }

    fn failure(&self) -> Option<String> {
        self.places.iter().enumerate().find_map(|(rank, place)| {
            let (place, mut result) = (lock(place), SUCCESS);
            let Held(place) = place.as_ref()?;
            // SAFETY: the rank's place, which is there while it is held; the number is valid for the write.
            let asked = unsafe { (self.nccl.comm_get_async_error)(*place, &mut result) };
            let failed = [asked, result].into_iter().find(|&result| result != SUCCESS && result != IN_PROGRESS)?;
            Some(format!("what carries for rank {rank} has failed: {}", self.nccl.words(failed)))
        })
    }
}

/// Ends all ranks' places: kernels that wait for another rank end, too.
fn end(nccl: &Nccl, places: Vec<Held>) {
    for Held(place) in places {
        // SAFETY: the rank's place, which nobody else has any more.
        unsafe { (nccl.comm_abort)(place) };
    }
}

impl Drop for NcclGroup {
    fn drop(&mut self) {
        self.abort();
        if let Some(ending) = lock(&self.ending).take() {
            // It tells nobody anything.
            let _ = ending.join();
        }
    }
}

impl std::fmt::Debug for NcclGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NcclGroup({}, {} ranks)", self.name(), self.contexts.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_missing_or_another_is_refused_by_name() {
        let refusal = |names: &[&str]| Nccl::open(names).map(|_| ()).unwrap_err().to_string();
        let missing = refusal(&["libnone.so.2", "libnone.so"]);
        assert!(missing.contains("libnone.so.2") && missing.contains("libnone.so:"), "{missing}");
        let other = refusal(&["libnone.so.2", "libm.so.6"]);
        assert!(other.contains("ncclGetVersion"), "{other}");
    }
}
