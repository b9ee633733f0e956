//! A terminal whose keys a test presses.

use std::{
    fs::{File, OpenOptions},
    io::{Read, Write},
    process::{Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
    time::Instant,
};

use rustix::{
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{LocalModes, Winsize, tcgetattr, tcsetwinsize},
};

use crate::wait::LIMIT;

/// The master side of a pseudo-terminal, and the slave side, which keeps it open.
#[derive(Debug)]
pub struct Terminal {
    master: File,
    slave: File,
    output: Receiver<Vec<u8>>,
    seen: String,
}

impl Terminal {
    /// Opens a terminal.
    pub fn open() -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let path = ptsname(&master, Vec::new()).unwrap().into_string().unwrap();
        let slave = OpenOptions::new().read(true).write(true).open(path).unwrap();
        let master = File::from(master);
        let mut reader = master.try_clone().unwrap();
        let (to, output) = channel();
        thread::spawn(move || {
            let mut buffer = [0; 4096];
            while let Ok(length @ 1..) = reader.read(&mut buffer) {
                if to.send(buffer[..length].to_vec()).is_err() {
                    break;
                }
            }
        });
        Self { master, slave, output, seen: String::new() }
    }

    /// Connects a command to this terminal.
    pub fn give<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        let side = || Stdio::from(self.slave.try_clone().unwrap());
        command.stdin(side()).stdout(side()).stderr(side())
    }

    /// Sets columns and rows.
    pub fn resize(&self, columns: u16, rows: u16) {
        let size = Winsize { ws_col: columns, ws_row: rows, ws_xpixel: 0, ws_ypixel: 0 };
        tcsetwinsize(&self.master, size).unwrap();
    }

    /// Presses keys.
    pub fn press(&mut self, keys: &str) {
        self.master.write_all(keys.as_bytes()).unwrap();
    }

    /// Waits for a text on the screen, and returns everything that was shown up to the text.
    ///
    /// # Panics
    /// If the text is not shown in time.
    pub fn wait_for(&mut self, text: &str) -> String {
        let deadline = Instant::now() + LIMIT;
        loop {
            if let Some(at) = self.seen.find(text) {
                let rest = self.seen.split_off(at + text.len());
                return std::mem::replace(&mut self.seen, rest);
            }
            let left = deadline.saturating_duration_since(Instant::now());
            let part = self.output.recv_timeout(left);
            let part = part.unwrap_or_else(|_| panic!("{text:?} is not in {:?}", self.seen));
            self.seen.push_str(&String::from_utf8_lossy(&part));
        }
    }

    /// Returns whether the terminal edits lines, which it does outside raw mode.
    pub fn edits_lines(&self) -> bool {
        let modes = tcgetattr(&self.slave).unwrap().local_modes;
        modes.contains(LocalModes::ICANON | LocalModes::ECHO | LocalModes::ISIG)
    }
}
