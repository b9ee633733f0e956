//! Files that `-f` names: files, directories and the standard input, as in kubectl.

use std::{
    fs,
    io::{self, Read},
    path::{Path, PathBuf},
};

mod documents;
mod objects;

pub use documents::MAX_DOCUMENTS;
pub use objects::{Malformed, Object, Objects};

/// Largest file, in bytes. A longer file is returned with one character beyond the limit, so that
/// its parser reports it.
pub const MAX_FILE_BYTES: usize = 4 * 1024 * 1024;
/// Limit on the bytes read from a file: room for at least one character beyond [`MAX_FILE_BYTES`].
const MAX_READ_BYTES: usize = MAX_FILE_BYTES + 4;
/// File name of the standard input.
const STDIN: &str = "-";
/// Endings of the files of a directory that are read.
const EXTENSIONS: [&str; 3] = ["json", "yaml", "yml"];
/// Most files.
const MAX_FILES: usize = 1000;
/// Most bytes of all files together.
const MAX_TOTAL_BYTES: usize = 64 << 20;
/// Longest name of a file, in bytes: Linux's `PATH_MAX`.
const MAX_NAME_BYTES: usize = 4096;

/// File of a manifest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct File {
    /// Path, which problems show.
    pub name: String,
    /// YAML or JSON.
    pub text: String,
}

/// Reads files, in order. `stdin` is the standard input. The error has the file's name and the
/// allowed values.
pub fn read(names: &[PathBuf], stdin: &mut dyn Read) -> Result<Vec<File>, String> {
    let mut paths = Vec::new();
    for name in names {
        if name != Path::new(STDIN) && name.is_dir() {
            paths.extend(files_of(name)?);
        } else {
            paths.push(name.clone());
        }
    }
    check_number(paths.len()).map_err(|rule| format!("-f {rule}"))?;
    let mut files = Vec::new();
    let mut bytes = 0;
    for path in paths {
        let text = read_file(&path, stdin).map_err(|error| unreadable(&path, &error))?;
        bytes += text.len();
        if bytes > MAX_TOTAL_BYTES {
            return Err(format!(
                "-f names more than {MAX_TOTAL_BYTES} bytes; allowed: {MAX_TOTAL_BYTES}"
            ));
        }
        files.push(File { name: path.display().to_string(), text });
    }
    Ok(files)
}

/// Checks the number of files and the lengths of their names. The error is the broken rule.
pub fn check(files: &[File]) -> Result<(), String> {
    check_number(files.len())?;
    match files.iter().map(|file| file.name.len()).max() {
        Some(bytes) if bytes > MAX_NAME_BYTES => {
            Err(format!("has a file name of {bytes} bytes; allowed: {MAX_NAME_BYTES}"))
        }
        _ => Ok(()),
    }
}

fn check_number(files: usize) -> Result<(), String> {
    if files > MAX_FILES {
        return Err(format!("names {files} files; allowed: {MAX_FILES}"));
    }
    Ok(())
}

fn unreadable(path: &Path, error: &io::Error) -> String {
    format!("{}: can't be read: {error}", path.display())
}

/// Returns the files of a directory, without those of its subdirectories, sorted by name.
fn files_of(directory: &Path) -> Result<Vec<PathBuf>, String> {
    let mut files = Vec::new();
    for entry in fs::read_dir(directory).map_err(|error| unreadable(directory, &error))? {
        let path = entry.map_err(|error| unreadable(directory, &error))?.path();
        let extension = path.extension().and_then(|extension| extension.to_str());
        if extension.is_some_and(|extension| EXTENSIONS.contains(&extension)) && !path.is_dir() {
            files.push(path);
        }
        if files.len() > MAX_FILES {
            break;
        }
    }
    if files.is_empty() {
        return Err(format!(
            "{}: has no file to read; allowed: a directory with *.json, *.yaml or *.yml",
            directory.display()
        ));
    }
    files.sort();
    Ok(files)
}

fn read_file(path: &Path, stdin: &mut dyn Read) -> io::Result<String> {
    if path == Path::new(STDIN) {
        return read_text(stdin);
    }
    read_text(fs::File::open(path)?)
}

/// Reads a text, up to the first character boundary beyond the limit.
fn read_text(file: impl Read) -> io::Result<String> {
    let mut bytes = Vec::new();
    file.take(MAX_READ_BYTES as u64).read_to_end(&mut bytes)?;
    if let Err(error) = str::from_utf8(&bytes)
        && bytes.len() == MAX_READ_BYTES
        && error.error_len().is_none()
    {
        // The last character is incomplete.
        bytes.truncate(error.valid_up_to());
    }
    let mut text = String::from_utf8(bytes).map_err(|error| {
        io::Error::new(io::ErrorKind::InvalidData, format!("not UTF-8: {}", error.utf8_error()))
    })?;
    text.truncate(text.ceil_char_boundary(MAX_FILE_BYTES + 1));
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(names: &[PathBuf]) -> Result<Vec<File>, String> {
        super::read(names, &mut "stdin".as_bytes())
    }

    fn names(read: &[File], directory: &Path) -> Vec<String> {
        let name = |file: &File| {
            Path::new(&file.name).strip_prefix(directory).unwrap().display().to_string()
        };
        read.iter().map(name).collect()
    }

    /// Verifies M8.
    #[test]
    fn directory_is_read_by_ending_without_subdirectories() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        fs::create_dir_all(path.join("below.yaml")).unwrap();
        for name in ["b.yml", "a.yaml", "c.json", "d.txt", "below.yaml/e.yaml"] {
            fs::write(path.join(name), name).unwrap();
        }
        let read_names = |names_of: &[PathBuf]| names(&read(names_of).unwrap(), path);
        assert_eq!(read_names(&[path.to_owned()]), ["a.yaml", "b.yml", "c.json"]);
        // A named file is read with any ending.
        assert_eq!(read_names(&[path.join("d.txt"), path.join("a.yaml")]), ["d.txt", "a.yaml"]);
        assert!(read(&[path.join("absent")]).unwrap_err().contains("absent: can't be read"));
        let empty = tempfile::tempdir().unwrap();
        let error = read(&[empty.path().to_owned()]).unwrap_err();
        assert!(error.contains("has no file to read; allowed"), "{error}");
    }

    /// Verifies M8.
    #[test]
    fn standard_input_is_read_by_its_name() {
        let read = read(&["-".into()]).unwrap();
        assert_eq!(read, [File { name: "-".into(), text: "stdin".into() }]);
    }

    /// Verifies M8.
    #[test]
    fn files_above_the_limits_are_refused() {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("a.yaml");
        fs::write(&file, "").unwrap();
        assert_eq!(read(&vec![file.clone(); MAX_FILES]).unwrap().len(), MAX_FILES);
        let error = read(&vec![file.clone(); MAX_FILES + 1]).unwrap_err();
        assert_eq!(error, "-f names 1001 files; allowed: 1000");
        fs::write(&file, "#".repeat(MAX_FILE_BYTES + 9)).unwrap();
        assert_eq!(read(std::slice::from_ref(&file)).unwrap()[0].text.len(), MAX_FILE_BYTES + 1);
        for (text, expected) in [("€€", 2), ("#€", 3), ("##😀😀", 1), ("😀😀", 3)] {
            fs::write(&file, "#".repeat(MAX_FILE_BYTES - 1) + text).unwrap();
            let read = read(std::slice::from_ref(&file)).unwrap();
            assert_eq!(read[0].text.len(), MAX_FILE_BYTES + expected, "{text}");
        }
        fs::write(&file, [b"#".repeat(MAX_FILE_BYTES - 1), b"\xe2\x82".to_vec()].concat()).unwrap();
        assert!(
            read(std::slice::from_ref(&file)).unwrap_err().contains("can't be read: not UTF-8")
        );
        fs::write(&file, "#".repeat(MAX_FILE_BYTES + 9)).unwrap();
        let error = read(&vec![file; MAX_TOTAL_BYTES / MAX_FILE_BYTES]).unwrap_err();
        assert!(error.contains("more than 67108864 bytes"), "{error}");
    }
}
