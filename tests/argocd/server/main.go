// One program that is every part of Argo CD that a sync needs, the client, and the cache they share: one module and
// one link, because the parts share most of their code.
//
// The part is chosen by the first argument, or else it is the client.
package main

import (
	"fmt"
	"os"
	"os/signal"
	"syscall"

	"github.com/alicebob/miniredis/v2"
	controller "github.com/argoproj/argo-cd/v3/cmd/argocd-application-controller/commands"
	repository "github.com/argoproj/argo-cd/v3/cmd/argocd-repo-server/commands"
	server "github.com/argoproj/argo-cd/v3/cmd/argocd-server/commands"
	client "github.com/argoproj/argo-cd/v3/cmd/argocd/commands"
	"github.com/spf13/cobra"
)

var servers = map[string]func() *cobra.Command{
	"argocd-application-controller": controller.NewCommand,
	"argocd-repo-server":            repository.NewCommand,
	"argocd-server":                 server.NewCommand,
}

func main() {
	name := ""
	if len(os.Args) > 1 {
		name = os.Args[1]
	}
	command := client.NewCommand
	if name == "redis" {
		exitOn(redis(os.Args[2:]))
		return
	}
	if server, ok := servers[name]; ok {
		command = server
		os.Args = os.Args[1:]
	}
	exitOn(command().Execute())
}

// redis serves the cache in memory at an address until it is told to end. Argo CD knows no smaller one.
func redis(arguments []string) error {
	if len(arguments) != 1 {
		return fmt.Errorf("usage: redis ADDRESS")
	}
	server := miniredis.NewMiniRedis()
	if err := server.StartAddr(arguments[0]); err != nil {
		return err
	}
	defer server.Close()
	end := make(chan os.Signal, 1)
	signal.Notify(end, syscall.SIGTERM, syscall.SIGINT)
	<-end
	return nil
}

func exitOn(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
