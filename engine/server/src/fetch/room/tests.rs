use super::*;
use crate::cli::{Cli, Command};
use crate::fetch::record::{FetchRecord, hold_until};
use clap::Parser;

const DAY: u64 = 86_400;
/// Larger than what a file's last block rounds by.
const UNIT: u64 = 1 << 20;

struct Cache {
    folder: tempfile::TempDir,
    now: SystemTime,
}

impl Cache {
    fn new() -> Cache {
        Cache { folder: tempfile::tempdir().expect("a folder"), now: SystemTime::now() }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn write(&self, name: &str, units: u64) -> PathBuf {
        let path = self.path(name);
        fs::create_dir_all(path.parent().expect("a folder")).expect("made");
        fs::write(&path, vec![7; (units * UNIT) as usize]).expect("written");
        path
    }

    /// A model that a pod last started with so many days ago.
    fn model(&self, name: &str, units: u64, days: u64) -> PathBuf {
        let path = self.write(name, units);
        self.used(&path, days);
        path
    }

    fn used(&self, model: &Path, days: u64) {
        FetchRecord::write(model, "1", 0.0, Vec::new()).expect("a record");
        let record = File::options().write(true).open(record::record_path(model)).expect("the record");
        record.set_modified(self.now - Duration::from_secs(days * DAY)).expect("dated");
    }

    fn room(&self, max_units: Option<u64>, keep_days: Option<u64>) -> Room {
        Room {
            folder: self.folder.path().to_owned(),
            contents: self.path("blobs"),
            own: self.path("own.gguf"),
            max_bytes: max_units.map(|units| units * UNIT),
            max_unused: keep_days.map(|days| Duration::from_secs(days * DAY)),
            _turn: None,
        }
    }

    fn left(&self) -> Vec<String> {
        let names = listed(self.folder.path()).expect("a folder").into_iter();
        let mut names: Vec<_> = names.filter_map(|path| Some(path.file_name()?.to_str()?.to_owned())).collect();
        names.retain(|name| !name.ends_with(".fetched.json"));
        names.sort();
        names
    }
}

#[test]
fn the_longest_unused_make_room_and_no_more_of_them() {
    let cache = Cache::new();
    for (name, days) in [("a.gguf", 3), ("b.gguf", 9), ("c.gguf", 1)] {
        cache.model(name, 2, days);
    }
    cache.room(Some(8), None).make(2 * UNIT, cache.now).expect("there is room");
    assert_eq!(cache.left(), ["a.gguf", "b.gguf", "c.gguf"]);
    cache.room(Some(7), None).make(2 * UNIT, cache.now).expect("room is made");
    assert_eq!(cache.left(), ["a.gguf", "c.gguf"]);
    cache.room(Some(7), None).make(6 * UNIT, cache.now).expect("room is made");
    assert!(cache.left().is_empty());
}

#[test]
fn what_is_served_begins_or_is_somebody_elses_stays_and_the_refusal_has_the_numbers() {
    let cache = Cache::new();
    let served = cache.model("served.gguf", 2, 30);
    let _held = hold_until(&served).expect("it is there");
    cache.model("begins.gguf", 2, 0);
    cache.model("own.gguf", 1, 30);
    cache.write("theirs.gguf", 2);
    let failure = cache.room(Some(6), Some(1)).make(2 * UNIT, cache.now).expect_err("nothing may go");
    assert_eq!(cache.left(), ["begins.gguf", "own.gguf", "served.gguf", "theirs.gguf"]);
    let text = failure.message;
    assert!(text.contains("may hold 6291456 bytes") && text.contains("needs 2097152 more"), "{text}");
    cache.room(Some(1), None).make(0, cache.now).expect("what is there already is not refused");
}

#[test]
fn what_was_unused_for_too_long_goes_though_there_is_room() {
    let cache = Cache::new();
    cache.model("old.gguf", 1, 8);
    cache.model("new.gguf", 1, 6);
    cache.room(None, Some(7)).make(UNIT, cache.now).expect("nothing is bounded");
    assert_eq!(cache.left(), ["new.gguf"]);
}

#[test]
fn a_content_goes_with_the_last_model_that_links_it() {
    let cache = Cache::new();
    let [shared, alone] = ["sha256-shared", "sha256-alone"].map(|name| cache.write(&format!("blobs/{name}"), 2));
    for (model, days, contents) in [("a", 9, vec![&shared, &alone]), ("b", 2, vec![&shared])] {
        fs::create_dir(cache.path(model)).expect("a folder");
        for (number, content) in contents.into_iter().enumerate() {
            fs::hard_link(content, cache.path(model).join(number.to_string())).expect("linked");
        }
        cache.used(&cache.path(model), days);
    }
    // Four units in three links.
    cache.room(Some(5), None).make(UNIT, cache.now).expect("there is room");
    assert_eq!(cache.left(), ["a", "b", "blobs"]);
    cache.room(Some(5), None).make(2 * UNIT, cache.now).expect("room is made");
    assert_eq!(cache.left(), ["b", "blobs"]);
    assert!(shared.exists() && !alone.exists());
}

#[test]
fn a_part_goes_that_nobody_downloads() {
    let cache = Cache::new();
    let part = |digit: &str| cache.write(&format!("{}.gguf.part", digit.repeat(64)), 1);
    let [left, under_way] = [part("a"), part("b")];
    for part in [&left, &under_way] {
        let file = File::options().write(true).open(part).expect("a part");
        file.set_modified(cache.now - Duration::from_secs(DAY)).expect("dated");
    }
    let download = File::open(&under_way).expect("a part");
    download.lock().expect("free");
    cache.room(Some(2), None).make(UNIT, cache.now).expect("room is made");
    assert!(!left.exists() && under_way.exists());
}

#[test]
fn the_record_goes_before_what_it_is_of() {
    let cache = Cache::new();
    let record = cache.write("a.gguf.fetched.json", 1);
    // What lies below a file cannot be removed.
    let path = cache.write("file", 1).join("a.gguf");
    let kept = Kept { path, held_by: record.clone(), used: cache.now };
    cache.room(None, None).remove(&kept).expect_err("it stays");
    assert!(!record.exists(), "what is left of a model would count as whole");
}

#[test]
fn whoever_may_have_to_make_room_has_the_folder_for_itself() {
    let cache = Cache::new();
    let enter = |flags: &[&str]| {
        let model = cache.path("models/own.gguf");
        let all = ["windlass-engine", "fetch", "-", "--to", model.to_str().expect("text")];
        let Command::Fetch(args) = Cli::parse_from(all.iter().chain(flags)).command else {
            panic!("fetch was asked for")
        };
        Room::enter(&args).expect("a folder")
    };
    let turn = || File::open(cache.path("models").join(TURN)).map(|file| file.try_lock().is_ok());
    let bounded = enter(&["--cache-max-bytes", "9"]);
    assert!(bounded.is_bounded() && !turn().expect("it is taken"), "another that has a bound waits");
    let free = enter(&[]);
    assert!(!free.is_bounded(), "one without a bound neither waits nor is waited for");
    drop(bounded);
    assert!(turn().expect("it stays there"), "the next one works");
}

#[test]
fn of_what_may_go_the_longest_unused_goes_first_whatever_the_folder_lists_first() {
    for days in [[1, 2, 3], [3, 2, 1], [2, 3, 1], [2, 1, 3]] {
        let cache = Cache::new();
        for (name, days) in ["a.gguf", "b.gguf", "c.gguf"].into_iter().zip(days) {
            cache.model(name, 2, days);
        }
        cache.room(Some(6), None).make(UNIT, cache.now).expect("room is made");
        let oldest = ["a.gguf", "b.gguf", "c.gguf"].into_iter().zip(days).find(|(_, days)| *days == 3);
        assert!(!cache.left().contains(&oldest.expect("one").0.to_owned()), "{days:?} {:?}", cache.left());
        assert_eq!(cache.left().len(), 2);
    }
}
