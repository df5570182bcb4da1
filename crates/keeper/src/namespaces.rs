//! The namespaces of a keeper: texts of clients, with the numbers by which keys name them.
//!
//! They are also in memory that outlives the process, so that the next one knows what the keys in the index mean. Each has a record
//! there, which is used again once its namespace is forgotten.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::Ordering;

use llm_datadist_core::bindings::keeper::SharedWords;

use crate::messages::{KeeperRefusal, ListedNamespace, NO_NAMESPACE, RefusalKind, ValueTerms};
use crate::sizes::{MAX_NAMESPACE, MAX_NAMESPACES, PAGE_NAMESPACES};

const WORD: usize = size_of::<u64>();
/// Words of the text of a namespace.
const TEXT: u64 = MAX_NAMESPACE.div_ceil(WORD) as u64;
/// Words of a record: the bytes of each value, whether they have checksums, the bytes of the text, and the text.
const RECORD: u64 = 3 + TEXT;
/// The word with the number of the next namespace.
const NEXT: u64 = 0;
/// The first of the words with the number of each record plus 1, which is 0 if the record is not used. They lie together, so that
/// reading them uses little memory.
const NUMBERS: u64 = 8;
const RECORDS: u64 = NUMBERS + MAX_NAMESPACES as u64;

/// Words of the memory that outlives the process.
pub(crate) const WORDS: u64 = RECORDS + MAX_NAMESPACES as u64 * RECORD;

/// Namespaces by number. A number stands for one text with one set of terms and is never used again, because a client that was away, or
/// is being disconnected, may still look for its keys.
#[derive(Debug)]
pub(crate) struct Namespaces {
    /// The numbers of each text. At most one of them has [fixed terms](Namespace::has_fixed_terms). The others only have readers.
    numbers: HashMap<Arc<str>, Vec<u32>>,
    all: BTreeMap<u32, Namespace>,
    /// Records that are not used. The last one is used next.
    free: Vec<u64>,
    words: Arc<SharedWords>,
}

#[derive(Debug)]
struct Namespace {
    text: Arc<str>,
    terms: ValueTerms,
    /// Clients that are attached to it and may put values. While there are any, or values, its text has no other terms.
    writers: u32,
    /// Clients that are attached to it and only read. Without any client and without values, it is forgotten.
    readers: u32,
    values: u32,
    record: u64,
}

impl Namespace {
    fn unused(&self) -> bool {
        self.readers == 0 && !self.has_fixed_terms()
    }

    /// Returns whether values or writers decide its terms.
    fn has_fixed_terms(&self) -> bool {
        self.writers > 0 || self.values > 0
    }
}

impl Namespaces {
    /// Returns the namespaces that `words` have, of which there are [`WORDS`], without clients and values.
    pub(crate) fn over(words: Arc<SharedWords>) -> Namespaces {
        let (numbers, all) = (HashMap::new(), BTreeMap::new());
        let mut namespaces = Namespaces { numbers, all, free: Vec::new(), words };
        for record in (0..MAX_NAMESPACES as u64).rev() {
            match namespaces.read_record(record) {
                Some((number, terms, text)) => namespaces.add(number, terms, text.into(), record),
                None => namespaces.free.push(record),
            }
        }
        namespaces
    }

    /// Returns the number of a text with terms for a client that may put values, with a new one if they are not known. Readers with
    /// [other terms](Self::with_other_terms) must not stay: they would find nothing. Returns the reason if the values or writers of this
    /// text have other terms, or if there are too many texts.
    pub(crate) fn attach(&mut self, text: &str, terms: ValueTerms) -> Result<u32, KeeperRefusal> {
        self.enter(text, terms, |namespace| &mut namespace.writers)
    }

    /// Returns the number of a text with terms for a client that only reads, as [`attach`](Self::attach) does. Writers may
    /// attach with other terms.
    pub(crate) fn attach_reader(&mut self, text: &str, terms: ValueTerms) -> Result<u32, KeeperRefusal> {
        self.enter(text, terms, |namespace| &mut namespace.readers)
    }

    fn enter(
        &mut self,
        text: &str,
        terms: ValueTerms,
        count: impl FnOnce(&mut Namespace) -> &mut u32,
    ) -> Result<u32, KeeperRefusal> {
        let mut known = None;
        for &number in self.numbers.get(text).into_iter().flatten() {
            match self.all.get(&number) {
                Some(namespace) if namespace.terms == terms => known = Some(number),
                Some(namespace) if namespace.has_fixed_terms() => {
                    return Err(other_terms(terms, namespace.terms));
                }
                _ => {}
            }
        }
        let number = known.map_or_else(|| self.learn(text, terms), Ok)?;
        if let Some(namespace) = self.all.get_mut(&number) {
            *count(namespace) += 1;
        }
        Ok(number)
    }

    /// Returns the numbers of the text of a namespace with other terms.
    pub(crate) fn with_other_terms(&self, number: u32) -> Vec<u32> {
        let numbers = self.all.get(&number).and_then(|namespace| self.numbers.get(&namespace.text));
        numbers.into_iter().flatten().copied().filter(|other| *other != number).collect()
    }

    /// Returns the terms of the values of a namespace.
    pub(crate) fn terms(&self, number: u32) -> Option<ValueTerms> {
        self.all.get(&number).map(|namespace| namespace.terms)
    }

    /// Counts the end of a client that may put values.
    pub(crate) fn detach(&mut self, number: u32) {
        self.count_down(number, |namespace| &mut namespace.writers);
    }

    /// Counts the end of a client that only reads.
    pub(crate) fn detach_reader(&mut self, number: u32) {
        self.count_down(number, |namespace| &mut namespace.readers);
    }

    /// Counts a value.
    pub(crate) fn add_value(&mut self, number: u32) {
        if let Some(namespace) = self.all.get_mut(&number) {
            namespace.values += 1;
        }
    }

    /// Counts the end of a value.
    pub(crate) fn remove_value(&mut self, number: u32) {
        self.count_down(number, |namespace| &mut namespace.values);
    }

    /// Counts the end of a client or a value, and forgets the namespace if it was the last one.
    fn count_down(&mut self, number: u32, count: impl FnOnce(&mut Namespace) -> &mut u32) {
        if let Some(namespace) = self.all.get_mut(&number) {
            let count = count(namespace);
            *count = count.saturating_sub(1);
            if namespace.unused() {
                self.forget(number);
            }
        }
    }

    /// Forgets the namespaces without a client and a value.
    pub(crate) fn forget_unused(&mut self) {
        let unused = self.all.iter().filter(|(_, namespace)| namespace.unused());
        for number in unused.map(|(&number, _)| number).collect::<Vec<_>>() {
            self.forget(number);
        }
    }

    /// Returns whether a namespace has this number.
    pub(crate) fn knows(&self, number: u32) -> bool {
        self.all.contains_key(&number)
    }

    /// Returns a page of those with numbers from `from` on, in their order, and the number from which the next page begins.
    pub(crate) fn list(&self, from: u32) -> (Vec<ListedNamespace>, Option<u32>) {
        let mut rest = self.all.range(from..).map(|(&number, namespace)| {
            let &Namespace { ref text, terms, values, .. } = namespace;
            let ValueTerms { value, checksums } = terms;
            ListedNamespace { number, text: (**text).into(), value, checksums, values }
        });
        let page = rest.by_ref().take(PAGE_NAMESPACES).collect();
        (page, rest.next().map(|namespace| namespace.number))
    }

    /// Returns how many there are.
    pub(crate) fn count(&self) -> u32 {
        u32::try_from(self.all.len()).unwrap_or(u32::MAX)
    }

    fn learn(&mut self, text: &str, terms: ValueTerms) -> Result<u32, KeeperRefusal> {
        let full = |what: &str| KeeperRefusal {
            kind: RefusalKind::System,
            argument: "namespace".into(),
            reason: format!("the keeper has {what}, which is the limit"),
        };
        let next = self.load_at(NEXT);
        let number = u32::try_from(next).ok().filter(|&number| number != NO_NAMESPACE);
        let number = number.ok_or_else(|| full(&format!("had {next} namespaces")))?;
        let record = self.free.pop().ok_or_else(|| full(&format!("{MAX_NAMESPACES} namespaces")))?;
        self.write_record(record, number, terms, text);
        self.add(number, terms, text.into(), record);
        Ok(number)
    }

    fn add(&mut self, number: u32, terms: ValueTerms, text: Arc<str>, record: u64) {
        self.numbers.entry(text.clone()).or_default().push(number);
        self.all.insert(number, Namespace { text, terms, writers: 0, readers: 0, values: 0, record });
    }

    fn forget(&mut self, number: u32) {
        if let Some(Namespace { text, record, .. }) = self.all.remove(&number) {
            if let Some(numbers) = self.numbers.get_mut(&text) {
                numbers.retain(|known| *known != number);
                if numbers.is_empty() {
                    self.numbers.remove(&text);
                }
            }
            self.store_at(NUMBERS + record, 0);
            self.free.push(record);
        }
    }

    /// Returns the number, the terms of values and the text of a record.
    fn read_record(&self, record: u64) -> Option<(u32, ValueTerms, String)> {
        let number = u32::try_from(self.load_at(NUMBERS + record).checked_sub(1)?).ok()?;
        let at = RECORDS + record * RECORD;
        let bytes = usize::try_from(self.load_at(at + 2)).ok().filter(|bytes| *bytes <= MAX_NAMESPACE)?;
        let words = (at + 3..at + RECORD).map(|at| self.load_at(at));
        let text = words.flat_map(u64::to_le_bytes).take(bytes).collect();
        let terms = ValueTerms { value: self.load_at(at), checksums: self.load_at(at + 1) != 0 };
        Some((number, terms, String::from_utf8(text).ok()?))
    }

    /// Writes a record. Its number is last, because a process that is killed leaves the others half-written.
    fn write_record(&self, record: u64, number: u32, terms: ValueTerms, text: &str) {
        let at = RECORDS + record * RECORD;
        self.store_at(NEXT, u64::from(number) + 1);
        self.store_at(at, terms.value);
        self.store_at(at + 1, terms.checksums.into());
        self.store_at(at + 2, text.len() as u64);
        for (at, part) in (at + 3..).zip(text.as_bytes().chunks(WORD)) {
            let mut word = [0; WORD];
            word[..part.len()].copy_from_slice(part);
            self.store_at(at, u64::from_le_bytes(word));
        }
        self.store_at(NUMBERS + record, u64::from(number) + 1);
    }

    fn load_at(&self, at: u64) -> u64 {
        self.words.word(at).load(Ordering::Relaxed)
    }

    fn store_at(&self, at: u64, number: u64) {
        self.words.word(at).store(number, Ordering::Release);
    }
}

fn other_terms(given: ValueTerms, known: ValueTerms) -> KeeperRefusal {
    let (argument, given, known) = if given.value == known.value {
        ("checksums", shown(given.checksums).to_owned(), shown(known.checksums).to_owned())
    } else {
        ("value", given.value.to_string(), known.value.to_string())
    };
    let reason = format!("{argument}={given} must be {known}, as in the namespace that the keeper has");
    KeeperRefusal { kind: RefusalKind::Argument, argument: argument.into(), reason }
}

/// Returns a truth value as Python writes it.
fn shown(value: bool) -> &'static str {
    if value { "True" } else { "False" }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Terms of values without checksums.
    fn of(value: u64) -> ValueTerms {
        ValueTerms { value, checksums: false }
    }

    fn words() -> Arc<SharedWords> {
        Arc::new(SharedWords::new("a test", WORDS).unwrap())
    }

    #[test]
    fn each_text_has_its_own_number_and_one_size() {
        let mut namespaces = Namespaces::over(words());
        assert_eq!(
            [namespaces.attach("a", of(64)), namespaces.attach("b", of(64)), namespaces.attach("a", of(64))],
            [Ok(0), Ok(1), Ok(0)]
        );
        let other = namespaces.attach("a", of(128)).unwrap_err();
        assert_eq!((other.kind, &*other.argument), (RefusalKind::Argument, "value"));
        assert_eq!(other.reason, "value=128 must be 64, as in the namespace that the keeper has");
        let other = namespaces.attach("a", ValueTerms { value: 64, checksums: true }).unwrap_err();
        assert_eq!((other.kind, &*other.argument), (RefusalKind::Argument, "checksums"));
        assert_eq!(other.reason, "checksums=True must be False, as in the namespace that the keeper has");
        for number in 2..MAX_NAMESPACES {
            namespaces.attach(&number.to_string(), of(1)).unwrap();
        }
        let many = namespaces.attach("c", of(1)).unwrap_err();
        assert_eq!((many.kind, &*many.argument), (RefusalKind::System, "namespace"));
        assert!(many.reason.contains("the limit"));
        assert_eq!(namespaces.attach("b", of(64)), Ok(1));
        namespaces.add_value(1);
        let (mut listed, mut from) = (Vec::new(), Some(0));
        while let Some(page) = from.map(|from| namespaces.list(from)) {
            assert!((1..=PAGE_NAMESPACES).contains(&page.0.len()));
            listed.extend(page.0);
            from = page.1;
        }
        assert!(listed.iter().map(|row| row.number as usize).eq(0..MAX_NAMESPACES));
        assert_eq!(
            listed[1],
            ListedNamespace { number: 1, text: "b".into(), value: 64, checksums: false, values: 1 }
        );
    }

    #[test]
    fn a_namespace_without_clients_and_values_is_forgotten_and_its_number_is_not_used_again() {
        let mut namespaces = Namespaces::over(words());
        let many = 3 * u32::try_from(MAX_NAMESPACES).unwrap();
        for number in 0..many {
            assert_eq!(namespaces.attach(&format!("model {number}"), of(64)), Ok(number));
            namespaces.add_value(number);
            namespaces.detach(number);
            assert_eq!(namespaces.count(), 1);
            namespaces.remove_value(number);
            assert!(!namespaces.knows(number));
        }
        // Its values may have another size now.
        assert_eq!(namespaces.attach("model 1", of(128)), Ok(many));
    }

    #[test]
    fn readers_bind_no_writer_to_their_terms() {
        let words = words();
        let mut namespaces = Namespaces::over(words.clone());
        let checked = ValueTerms { value: 64, checksums: true };
        // Readers with different terms, before there is a writer.
        assert_eq!([1, 64, 1].map(|value| namespaces.attach_reader("a", of(value))), [Ok(0), Ok(1), Ok(0)]);
        assert_eq!((namespaces.attach("a", checked), namespaces.terms(2)), (Ok(2), Some(checked)));
        assert_eq!(namespaces.with_other_terms(2), [0, 1]);
        for refused in [namespaces.attach_reader("a", of(64)), namespaces.attach("a", of(64))] {
            assert!(refused.unwrap_err().reason.starts_with("checksums=False must be True"));
        }
        namespaces.add_value(2);
        namespaces.detach(2);
        assert!(namespaces.attach("a", of(64)).is_err(), "its values have checksums");
        let next = Namespaces::over(words);
        assert_eq!([0, 1, 2].map(|number| next.terms(number)), [of(1), of(64), checked].map(Some));
        namespaces.remove_value(2);
        assert_eq!((namespaces.attach("a", checked), namespaces.knows(2)), (Ok(3), false));
        namespaces.detach(3);
        assert_eq!(namespaces.attach("a", of(64)), Ok(1), "as one of the readers");
        namespaces.detach(1);
        for number in [0, 0, 1] {
            namespaces.detach_reader(number);
        }
        assert_eq!((namespaces.count(), namespaces.numbers.len()), (0, 0));
    }

    #[test]
    fn the_next_process_knows_the_namespaces_with_values() {
        let words = words();
        let mut before = Namespaces::over(words.clone());
        let long = "ü".repeat(MAX_NAMESPACE / 2);
        for text in ["a", "client only", &long, "gone"] {
            before.attach(text, of(64)).unwrap();
        }
        before.detach(3);
        // A process that was killed had not written the number yet.
        words.word(RECORDS + 3 * RECORD + 2).store(u64::MAX, Ordering::Relaxed);
        let mut after = Namespaces::over(words.clone());
        after.add_value(0);
        after.add_value(2);
        after.forget_unused();
        assert_eq!((after.count(), after.knows(0), after.knows(1)), (2, true, false));
        let again = [("a", 64), (&*long, 64), ("client only", 8), ("gone", 8)];
        assert_eq!(again.map(|(text, value)| after.attach(text, of(value))), [Ok(0), Ok(2), Ok(4), Ok(5)]);
        assert!(after.attach("a", of(8)).is_err());
        let terms = ValueTerms { value: 64, checksums: true };
        assert!(after.attach("a", terms).is_err());
        assert_eq!(after.attach("checked", terms), Ok(6));
        let mut later = Namespaces::over(words);
        assert_eq!((later.terms(6), later.terms(0)), (Some(terms), Some(of(64))));
        later.add_value(6);
        assert!(later.attach("checked", of(64)).is_err());
    }
}
